"""Settings come from flag, variable, file, default, in this order; a misspelt name is an error that names the
nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.cli.config import (
    COMMON,
    SECTIONS,
    SERVICE_VARIABLE,
    ConfigError,
    Sources,
    Value,
    known_names,
    load,
    variable_of,
)
from splitserve.cli.settings import ServerSettings

FLAGS = {"model": Value("/models/flag", "--model"), "insecure": Value("true", "--insecure")}


def coordinator(
    flags: dict[str, str] | None = None, env: dict[str, str] | None = None, file: Path | None = None
) -> ServerSettings:
    layer = {**FLAGS, **{name: Value(value, f"--{name}") for name, value in (flags or {}).items()}}
    settings = load("coordinator", layer, Sources.read(file, env or {}))
    assert isinstance(settings, ServerSettings)
    return settings


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_source_beats_the_next(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "coordinator: {max_queue: 4}\ncommon: {max_queue: 5, port: 9005}\n")
    env = {"SPLITSERVE_COORDINATOR_MAX_QUEUE": "2", "SPLITSERVE_MAX_QUEUE": "3"}
    assert coordinator({"max_queue": "1"}, env, file).max_queue == 1
    assert coordinator({}, env, file).max_queue == 2
    assert coordinator({}, {"SPLITSERVE_MAX_QUEUE": "3"}, file).max_queue == 3
    assert coordinator({}, {}, file).max_queue == 4
    assert coordinator({}, {}, file).port == 9005
    assert coordinator().max_queue == 1024


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "coordinator: {port: 9001}")
    assert coordinator(env={"SPLITSERVE_CONFIG": str(file)}).port == 9001


def test_common_settings_reach_only_commands_that_have_them(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "common: {drain_timeout_s: 3, insecure: true, model: /m}")
    sources = Sources.read(file, {})
    assert load("decode", {}, sources).model_dump()["drain_timeout_s"] == 3
    assert "drain_timeout_s" not in load("coordinator", {}, sources).model_dump()


@pytest.mark.parametrize(
    ("env", "near"),
    [
        ({"SPLITSERVE_MAX_QEUE": "1"}, "SPLITSERVE_MAX_QUEUE"),
        ({"SPLITSERVE_DECODE_LISTENS": "1"}, "SPLITSERVE_DECODE_LISTEN"),
        ({"SPLITSERVE_CONFIGS": "x"}, "SPLITSERVE_CONFIG"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(env: dict[str, str], near: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(env))} is not a setting; did you mean '{near}'"):
        Sources.read(None, env)


def of_service(name: str, port: int = 8000, address: str = "10.96.0.7") -> dict[str, str]:
    """The variables that Kubernetes sets in every pod of the namespace for a Service of this name."""
    name = name.upper().replace("-", "_")
    url = f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP": str(port),
        f"{name}_PORT": url,
        f"{name}_PORT_{port}_TCP": url,
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": address,
    }


@pytest.mark.parametrize(
    "name",
    ["splitserve", "splitserve-coordinator", "splitserve-admin", "splitserve-decode", "splitserve-x-1"],
)
@pytest.mark.parametrize("address", ["10.96.0.7", "fd00::7"])
def test_the_variables_of_a_kubernetes_service_are_no_settings(name: str, address: str) -> None:
    settings = coordinator(env=of_service(name, address=address))
    assert (settings.port, settings.admin_port) == (coordinator().port, coordinator().admin_port)
    assert coordinator(env={**of_service(name), "SPLITSERVE_COORDINATOR_MAX_QUEUE": "3"}).max_queue == 3


def test_no_setting_is_taken_for_the_variable_of_a_service() -> None:
    for section, fields in known_names().items():
        assert not [
            name
            for name in fields
            if SERVICE_VARIABLE.search(variable_of(name, "" if section == COMMON else section))
        ]
    assert coordinator(env={"SPLITSERVE_PORT": "9001"}).port == 9001
    for env in (
        {"SPLITSERVE_PROT": "tcp://10.96.0.7:80"},
        {"SPLITSERVE_PORT": "tcp:/10.96.0.7"},
        {"SPLITSERVE_HTTP_PORT": "9001"},
    ):
        with pytest.raises(ConfigError, match=next(iter(env))):
            coordinator(env=env)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coordinator: {prot: 1}", "unknown setting 'prot' in section 'coordinator'; did you mean 'port'"),
        ("prefil: {max_num_seqs: 1}", "unknown section 'prefil'; did you mean 'prefill'"),
        ("common: {max_num_seq: 1}", "did you mean 'max_num_seqs'"),
        ("coordinator: [port]", "should hold `name: value` lines"),
        ("just text", "should hold `name: value` lines"),
        (
            "a: {b: [",
            r"cannot read the configuration file .*c\.yaml: line 1, column 9: expected the node content",
        ),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sources.read(written(tmp_path / "c.yaml", text), {})


@pytest.mark.parametrize(
    ("line", "is_secret"),
    [
        ("redis_url: redis://:hunter2@10.0.0.1/0", True),
        ("usage_url: postgresql://usage:hunter2@db/usage", True),
        ("steer_webhook: https://hooks.example/x?token=hunter2", True),
        ("redis_url: redis://10.0.0.1:6379/0", False),
        ("control_address: tcp://[::1]:7700", False),
    ],
)
def test_a_file_with_a_password_must_be_private(tmp_path: Path, line: str, is_secret: bool) -> None:
    path = tmp_path / "splitserve.yaml"
    path.write_text(f"coordinator:\n  {line}\n")
    path.chmod(0o644)
    if is_secret:
        with pytest.raises(ConfigError, match=r"holds a password or key.*chmod 600") as raised:
            Sources.read(path, {})
        assert "hunter2" not in str(raised.value)
    else:
        Sources.read(path, {})
    path.chmod(0o600)
    Sources.read(path, {})


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file /nowhere"):
        Sources.read(Path("/nowhere/c.yaml"), {})


def test_a_wrong_value_is_traced_to_its_origin(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "coordinator: {port: 70000}")
    with pytest.raises(ConfigError, match=r"c\.yaml: coordinator\.port: 70000 cannot be used: .*65535"):
        coordinator(file=file)
    with pytest.raises(ConfigError, match=r"SPLITSERVE_ROUTING: 'best' cannot be used: .*'hybrid'"):
        coordinator(env={"SPLITSERVE_ROUTING": "best"})
    with pytest.raises(ConfigError, match="--redis-url keeps the limits of --tenants-file"):
        coordinator(env={"SPLITSERVE_REDIS_URL": "redis://10.0.0.1:6379/0"})


def test_a_value_of_another_form_is_answered_with_the_form_in_words() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--steer-slo: 'fast' cannot be used: it has the wrong form\. What requests may take, "
        r".*ttft=2,tpot=0",
    ):
        load("coordinator", {**FLAGS, "steer_slo": Value("fast", "--steer-slo")}, Sources.read(None, {}))
    with pytest.raises(
        ConfigError,
        match=r"--url: 'h:1' cannot be used: .* The server's address\. Such as http://127\.0\.0\.1:8000\.$",
    ):
        load("chat", {"url": Value("h:1", "--url")}, Sources.read(None, {}))
    threads = {name: Value("9999", f"--{name}") for name in ("model", "coordinator", "threads")}
    threads |= {"insecure": Value(True, "--insecure"), "coordinator": Value("tcp://h:1", "--coordinator")}
    with pytest.raises(ConfigError, match=r"^--threads: '9999' cannot be used: it has .*1024; auto: .*$"):
        load("prefill", threads, Sources.read(None, {}))  # one line, though it may be of two types
    with pytest.raises(ConfigError, match=r"--tenant: 'a/b' cannot be used: .* is made\.$"):
        load("keys_create", {"tenant": Value("a/b", "--tenant")}, Sources.read(None, {}))


def test_what_is_needed_is_said() -> None:
    with pytest.raises(ConfigError, match="--model is needed"):
        load("prefill", {}, Sources.read(None, {}))
    with pytest.raises(ConfigError, match="splitserve keygen"):
        load("prefill", {"model": Value("/m", "--model")}, Sources.read(None, {}))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        coordinator().port = 1  # type: ignore[misc]


def test_no_two_settings_share_a_variable() -> None:
    names = known_names()
    variables = [
        variable_of(name, "" if section == COMMON else section)
        for section, fields in names.items()
        for name in fields
    ]
    assert len(variables) == len(set(variables))


def test_every_setting_is_described() -> None:
    assert all(field.description for model in SECTIONS.values() for field in model.model_fields.values())


@pytest.mark.parametrize("page", ["hosts.md", "configuration.md"])
def test_the_files_shown_in_the_docs_are_valid(page: str, tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    shown = text.split("```yaml\n")[1].split("```")[0]
    settings = load("decode", {}, Sources.read(written(tmp_path / "c.yaml", shown), {}))
    assert settings.model_dump()["key_file"]
