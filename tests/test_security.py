"""Who may ask, however the address is spelled; and what a hostile request or model folder gets."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from oracle import tiny_llama
from running import Running, run_cli, running_service

KEYLESS = ("/healthz", "/readyz", "/health")
ONE = {"prompt": [1, 2], "completions": [[3]]}


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with two keys in a variable, one in a file, and an admin's."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("filed-key\n\n")
    flags = ["--model", str(tiny_folder), "--api-key-file", str(folder / "keys")]
    keys = "first-key, second-key"
    with running_service(folder / "log", *flags, LOGPROBD_API_KEY=keys, LOGPROBD_ADMIN_KEY="admin-key") as running:
        yield running


def ask(running: Running, method: str, path: str, key: str | None = None, **headers: str) -> httpx.Response:
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    content = json.dumps(ONE) if method == "POST" else None
    return httpx.request(method, running.url + path, content=content, headers={**authorization, **headers}, timeout=30)


def test_every_route_but_liveness_needs_a_key(guarded: Running) -> None:
    paths = ask(guarded, "GET", "/openapi.json", "first-key").json()["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}

    assert ("POST", "/logprobs") in routes
    assert ("POST", "/admin/drain") in routes
    for method, path in [*routes, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere")]:
        expected = 200 if path in KEYLESS else 401
        assert ask(guarded, method, path).status_code == expected, (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "//logprobs",
        "/logprobs/",
        "/LOGPROBS",
        "/%6cogprobs",
        "/healthz/../logprobs",
        "/healthz/%2e%2e/logprobs",
        "/healthz%2f..%2flogprobs",
        "/logprobs?/healthz",
        "/logprobs#/healthz",
        "/logprobs;/healthz",
        "/healthz/",
        "//healthz",
        "/Healthz",
        "/%2fhealthz",
        "http://127.0.0.1/logprobs",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "PUT"])
def test_no_spelling_of_an_address_gets_past_the_key(guarded: Running, method: str, path: str) -> None:
    assert raw(guarded, f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0").startswith("HTTP/1.1 401")


@pytest.mark.parametrize("host", ["localhost", "/healthz", "127.0.0.1:80/healthz", "", "healthz"])
def test_no_host_header_gets_past_the_key(guarded: Running, host: str) -> None:
    headers = f"Host: {host}\r\nX-Forwarded-Prefix: /healthz\r\nX-Original-URL: /healthz\r\nContent-Length: 0"

    assert " 401 " in raw(guarded, f"POST /logprobs HTTP/1.1\r\n{headers}").splitlines()[0]


def raw(running: Running, head: str) -> str:
    """The answer to a request written byte by byte, as no library would."""
    port = int(running.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1"))
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
    return answer.decode("latin-1")


@pytest.mark.parametrize("key", ["first-key", "second-key", "filed-key", "admin-key"])
def test_any_of_several_keys_opens_the_service(guarded: Running, key: str) -> None:
    assert ask(guarded, "POST", "/logprobs", key).status_code == 200


@pytest.mark.parametrize("key", ["", "first", "first-key2", "first-key,second-key", "first-key, second-key", "ключ"])
def test_any_other_key_does_not(guarded: Running, key: str) -> None:
    refused = raw(guarded, f"GET /info HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key.encode().decode('latin-1')}")

    assert refused.startswith("HTTP/1.1 401")
    assert "www-authenticate: Bearer" in refused


@pytest.mark.parametrize("header", ["Basic first-key", "first-key", "Bearer", "bearerfirst-key"])
def test_a_key_comes_as_a_bearers(guarded: Running, header: str) -> None:
    assert ask(guarded, "GET", "/info", Authorization=header).status_code == 401
    assert ask(guarded, "GET", "/info", Authorization="bearer first-key").status_code == 200


def test_an_admins_route_needs_an_admins_key(guarded: Running) -> None:
    refused = ask(guarded, "POST", "/admin/drain", "first-key")

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    for path in ("//admin/drain", "/Admin/drain", "/admin/../admin/drain"):
        assert raw(guarded, f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key").startswith(
            "HTTP/1.1 403"
        )


def test_an_admin_may_drain_the_service(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), LOGPROBD_ADMIN_KEY="admin") as running:
        refused = ask(running, "POST", "/admin/drain", "nobody").status_code
        accepted = ask(running, "POST", "/admin/drain", "admin").status_code

        assert (refused, accepted) == (401, 202)
        assert running.process.wait(30) == 0


def test_without_an_admins_key_there_is_no_admins_route(tiny_service: Running) -> None:
    assert ask(tiny_service, "POST", "/admin/drain").status_code == 404


def test_a_file_without_keys_refuses_to_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n\n")
    for name in ("empty", "absent"):
        result = run_cli("serve", "--api-key-file", str(tmp_path / name))

        assert result.returncode == 2
        assert "--api-key-file" in result.stderr


def test_a_public_address_with_a_key_from_a_file_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key")
    result = run_cli("serve", "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys"), "--port", "99999")

    assert "--port" in result.stderr  # the only thing wrong


@pytest.mark.parametrize(
    "head", ["GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + "a" * 1_000_000, "GET /" + "a" * 100_000]
)
def test_endless_headers_and_addresses_are_cut_off(guarded: Running, head: str) -> None:
    try:
        answer = raw(guarded, head)
    except (BrokenPipeError, ConnectionResetError):
        answer = ""  # hung up on while still sending

    assert not answer or " 400 " in answer.splitlines()[0]
    assert guarded.get("/healthz").status_code == 200


def test_ten_thousand_headers_are_cut_off(guarded: Running) -> None:
    try:
        answer = raw(guarded, "GET /healthz HTTP/1.1\r\nHost: x\r\n" + "\r\n".join(f"X-{n}: 1" for n in range(10_000)))
    except (BrokenPipeError, ConnectionResetError):
        answer = ""

    assert not answer or " 400 " in answer.splitlines()[0]


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: x=1", "a\nlevel=error", "\x1b[31mred", "a b", "é", "a" * 129])
def test_a_request_id_cannot_write_into_headers_or_logs(guarded: Running, value: str) -> None:
    answer = raw(guarded, f"GET /info HTTP/1.1\r\nHost: x\r\nX-Request-Id: {value}")

    assert "set-cookie" not in answer.lower().partition("\r\n\r\n")[0]
    assert "level=error" not in guarded.log
    assert "\x1b[31mred" not in guarded.log


def test_a_path_cannot_write_into_the_log(guarded: Running) -> None:
    raw(guarded, "GET /a%0alevel=error%1b[31m HTTP/1.1\r\nHost: x")

    assert "\nlevel=error" not in guarded.log
    assert "\x1b[31m" not in guarded.log


def test_no_key_is_ever_logged(guarded: Running) -> None:
    ask(guarded, "POST", "/logprobs", "first-key")
    ask(guarded, "POST", "/logprobs", "a-wrong-key")

    for key in ("first-key", "second-key", "filed-key", "admin-key", "a-wrong-key"):
        assert key not in guarded.log


def test_answers_forbid_sniffing_and_storing(guarded: Running) -> None:
    for response in (
        ask(guarded, "GET", "/healthz"),
        ask(guarded, "GET", "/info"),
        ask(guarded, "GET", "/docs", "first-key"),
    ):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert "server" not in response.headers


@pytest.mark.parametrize("body", [b"\x80\x04K\x01.", b"(lp0\n.", b"\x93NUMPY\x01\x00"])
def test_pickles_and_their_like_are_never_read(guarded: Running, body: bytes) -> None:
    for kind in ("application/json", "application/vnd.safetensors"):
        headers = {"Authorization": "Bearer first-key", "Content-Type": kind}
        response = httpx.post(guarded.url + "/logprobs", content=body, headers=headers)
        assert response.status_code == 400
    headers = {"Authorization": "Bearer first-key", "Content-Type": "application/octet-stream"}
    assert httpx.post(guarded.url + "/logprobs", content=body, headers=headers).status_code == 415


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "was-run"
    tiny_llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    with running_service(tmp_path / "log", "--model", str(folder), ready=False) as running:
        code = running.process.wait(120)

        assert code == 1
        assert "--trust-remote-code" in running.log
        assert not mark.exists()


def test_weights_in_pickles_are_not_loaded(tmp_path: Path) -> None:

    folder = tmp_path / "model"
    model = tiny_llama()
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with running_service(tmp_path / "log", "--model", str(folder), ready=False) as running:
        assert running.process.wait(120) == 1
        assert "safetensors" in running.log
