"""Clients of others against a real cluster: each streams, has a tool called and asks for a format.

deploy/test_clients.sh installs them. Each Python client has an environment of its own: their versions clash.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from e2e.cluster import MODEL_NAME, NEVER_DEAD, running
from support.browser import CHROMIUM, browser
from support.scripted_model import CITY, TEXT, write_scripted_model

HERE = Path(__file__).parent / "trials"
PYTHONS = HERE.parents[2] / ".venv-trials"
if not (PYTHONS / ".prepared").is_file():
    pytest.skip("runs by deploy/test_clients.sh", allow_module_level=True)

PROGRAMS = HERE / "node_modules" / ".bin"
ANSWER = "".join(TEXT)
NOTE = "splitserve-was-here\n"
STRUCTURED = {"structured": CITY}
EXPECTED = {"streamed": ANSWER, "called": {"name": "weather", "arguments": CITY}, **STRUCTURED}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OF_PYTHON = [
    *(("openai", variant) for variant in ("chat", "responses")),
    ("anthropic", "messages"),
    ("openai-agents", "responses"),
    *(("pydantic-ai", variant) for variant in ("openai", "anthropic")),
    *(("langchain", variant) for variant in ("chat", "responses", "anthropic")),
]
OF_NODE = [
    *(("sdks", variant) for variant in ("chat", "responses", "anthropic")),
    *(("langchain", variant) for variant in ("chat", "responses", "anthropic")),
    *(("ai_sdk", variant) for variant in ("default", "chat", "anthropic")),
]
MODES = ["FUNCTIONS", "TOOLS", "TOOLS_STRICT", "JSON", "JSON_O1", "MD_JSON", "JSON_SCHEMA"]
MODES += ["ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_JSON"]
UNSTREAMED = ["PARALLEL_TOOLS", "ANTHROPIC_PARALLEL_TOOLS", "RESPONSES_TOOLS"]
UNSTREAMED += ["RESPONSES_TOOLS_WITH_INBUILT_TOOLS"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that pages of this machine may use."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("cluster")
    write_scripted_model(model)
    with running(model, folder, *NEVER_DEAD, "--allowed-origins", "http://localhost:*") as cluster:
        yield cluster.url
        cluster.wait_at_rest()


def output(*command: object, cwd: Path | None = None, **environment: object) -> str:
    """Run a program that must succeed."""
    run = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def python_client(url: str, client: str, variant: str) -> Any:
    script = HERE / "python_clients.py"
    return json.loads(output(PYTHONS / client / "bin/python", "-W", "ignore", script, url, client, variant))


@pytest.mark.parametrize(("client", "variant"), OF_PYTHON)
def test_python(url: str, client: str, variant: str) -> None:
    assert python_client(url, client, variant) == EXPECTED


@pytest.mark.parametrize("mode", [*MODES, *UNSTREAMED])
def test_instructor(url: str, mode: str) -> None:
    streamed = {} if mode in UNSTREAMED else {"streamed": CITY}
    assert python_client(url, "instructor", mode) == {**STRUCTURED, **streamed}


@pytest.mark.parametrize(("client", "variant"), OF_NODE)
def test_node(url: str, client: str, variant: str) -> None:
    assert json.loads(output("node", HERE / f"{client}.mjs", url, variant).splitlines()[-1]) == EXPECTED


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("variant", ["chat", "responses", "anthropic"])
async def test_browser(url: str, variant: str, tmp_path: Path) -> None:
    """A page of another origin, which has the clients for JavaScript in it."""
    site = tmp_path / "site"
    output(PROGRAMS / "esbuild", HERE / "sdks.mjs", "--bundle", "--format=esm", f"--outfile={site}/sdks.js")
    (site / "index.html").write_text('<script type="module" src="sdks.js"></script>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        async with browser(tmp_path / "profile") as page:
            await page.open(f"http://localhost:{server.server_port}/index.html")
            await page.until("globalThis.trials !== undefined")
            assert await page.value(f"trials.{variant}('{url}')") == EXPECTED
    finally:
        server.shutdown()
        server.server_close()


def test_llm(url: str, tmp_path: Path) -> None:
    model = {"model_id": MODEL_NAME, "model_name": MODEL_NAME, "api_base": f"{url}/v1"}
    can = {"supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([{**model, **can}]))

    def llm(*arguments: str) -> str:
        program = PYTHONS / "llm/bin/llm"
        return output(program, "-m", MODEL_NAME, *arguments, LLM_USER_PATH=tmp_path, OPENAI_API_KEY="none")

    assert llm("Hi") == llm("--no-stream", "Hi") == f"{ANSWER}\n"
    note = tmp_path / "note.txt"
    tool = f"def weather(city: str) -> str:\n    open({str(note)!r}, 'w').write(city)\n    return 'sunny'"
    assert llm("--functions", tool, "Weather?") == f"{ANSWER}\n"
    assert note.read_text() == CITY["city"]
    assert json.loads(llm("--schema", json.dumps(SCHEMA), "Where?")) == CITY


def test_aider(url: str, tmp_path: Path) -> None:
    """Streams; it edits files by its own marks in texts, not by tools or formats."""
    quiet = ("--no-git", "--yes", "--no-check-update", "--no-show-model-warnings", "--analytics-disable")
    where = ("--model", f"openai/{MODEL_NAME}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none")
    text = output(PYTHONS / "aider/bin/aider", *quiet, *where, "--message", "Hi", cwd=tmp_path, HOME=tmp_path)
    assert ANSWER in text


def test_codex(url: str, tmp_path: Path) -> None:
    """Runs the command that the model calls for, and answers by a schema."""
    provider = {"name": "splitserve", "base_url": f"{url}/v1", "wire_api": "responses"}
    lines = [f'model = "{MODEL_NAME}"', 'model_provider = "splitserve"', "[model_providers.splitserve]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (work := tmp_path / "work").mkdir()

    def codex(*arguments: object) -> str:
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return output(PROGRAMS / "codex", "exec", *free, *arguments, cwd=work, CODEX_HOME=tmp_path).strip()

    assert codex("Write a note").endswith(ANSWER)
    assert (work / "note.txt").read_text() == NOTE
    assert json.loads(codex("--output-schema", tmp_path / "schema.json", "Where?").splitlines()[-1]) == CITY


def test_claude_code(url: str, tmp_path: Path) -> None:
    """Runs the command that the model calls for; it asks for no formats."""
    (work := tmp_path / "work").mkdir()
    own = {"HOME": tmp_path, "IS_SANDBOX": 1, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
    own |= dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), MODEL_NAME)
    own |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": 1, "DISABLE_AUTOUPDATER": 1}
    how = ("--dangerously-skip-permissions", "--output-format", "json")
    text = output(PROGRAMS / "claude", "-p", "Write a note", *how, cwd=work, **own)
    assert json.loads(text.splitlines()[-1])["result"] == ANSWER
    assert (work / "note.txt").read_text() == NOTE


def test_opencode(url: str, tmp_path: Path) -> None:
    """Runs the command that the model calls for; it asks for no formats."""
    limits = {"limit": {"context": 100_000, "output": 1_000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL_NAME: limits},
    }
    name = f"splitserve/{MODEL_NAME}"
    config = {"model": name, "small_model": name, "provider": {"splitserve": provider}, "permission": "allow"}
    (tmp_path / "opencode.json").write_text(json.dumps({**config, "autoupdate": False, "share": "disabled"}))
    (work := tmp_path / "work").mkdir()
    own = {"HOME": tmp_path, "PWD": work, "OPENCODE_CONFIG": tmp_path / "opencode.json"}
    own |= {f"XDG_{kind}_HOME": tmp_path / kind for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    text = output(PROGRAMS / "opencode", "run", "Write a note", cwd=work, **own)
    assert ANSWER in text
    assert (work / "note.txt").read_text() == NOTE
