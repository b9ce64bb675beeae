"""Pages under the names that vLLM, SGLang and llama.cpp gave them, for clients that look there.

GET /tokenizer_info      the tokenizer's configuration and the chat template (vLLM)
GET /props               context, sampling defaults, chat template (llama.cpp)
GET /load                requests that are open, waiting and running (vLLM); for operators
GET /server_info         version, settings, workers (vLLM, SGLang); for operators
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ..http.answers import json_response
from ..serving import Servings

SECRET = re.compile(r"(?<=://)[^/?#@]+(?=@)|(?<==)[^&]+")
"""The parts of a URL that may be secret: user and password, and the values of its query."""


class PeerPages:
    """``settings``: JSON-ready, those of the coordinator. Of several models each page is about that which
    ``?model=`` names, /load about all."""

    def __init__(self, servings: Servings, settings: Mapping[str, Any]) -> None:
        self._servings = servings
        self._settings = {name: _without_secrets(value) for name, value in settings.items()}

    def routes(self) -> list[Route]:
        return [
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/props", self._props),
            Route("/load", self._load),
            Route("/server_info", self._server_info),
        ]

    async def _tokenizer_info(self, request: Request) -> Response:
        model = self._servings.asked(request).model
        return json_response({**model.tokenizer.config, "chat_template": model.template_source})

    async def _props(self, request: Request) -> Response:
        serving = self._servings.asked(request)
        model, defaults = serving.model, serving.model.defaults
        params = {
            "temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p,
            "min_p": defaults.min_p, "repeat_penalty": defaults.repetition_penalty,
            "n_predict": defaults.max_new_tokens or -1,
        }  # fmt: skip
        special = model.tokenizer.special_tokens()
        return json_response(
            {
                "default_generation_settings": {"n_ctx": model.max_model_len, "params": params},
                "total_slots": sum(worker.max_num_seqs for worker in serving.system().workers),
                "model_alias": model.name,
                "model_path": model.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": model.template_source,
                "bos_token": special.get("bos_token", ""),
                "eos_token": special.get("eos_token", ""),
                "build_info": f"splitserve {__version__}",
            }
        )

    async def _load(self, request: Request) -> Response:
        systems = [serving.system() for serving in self._servings.all]
        waiting, running = (sum(getattr(s, f"num_{k}") for s in systems) for k in ("waiting", "running"))
        return json_response({"server_load": self._servings.num_open, "waiting": waiting, "running": running})

    async def _server_info(self, request: Request) -> Response:
        serving = self._servings.asked(request)
        model, workers = serving.model, Counter(worker.role for worker in serving.system().workers)
        return json_response(
            {
                "version": __version__,
                "model": model.name,
                "max_model_len": model.max_model_len,
                "workers": workers,
                "settings": self._settings,
            }
        )


def _without_secrets(value: Any) -> Any:
    return SECRET.sub("***", value) if isinstance(value, str) and "://" in value else value
