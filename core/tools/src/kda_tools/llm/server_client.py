"""Send requests to a running server, with errors that say what is wrong with it."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from urllib.parse import urlsplit

from kda_judge.contract.errors import MissingRequirement, UsageError

TIMEOUT_S = 20.0
"""Seconds to wait for an answer that needs no tokens."""
FIRST_ANSWER_S = 300.0
"""Seconds to wait for the first token: an engine may have to compile before it."""


def check_url(url: str) -> str:
    """The server's address without a trailing slash.

    Raises:
        UsageError: it is no address of a server.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/") and not parts.query
        fits = bool(fits) and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"{url}: expected a server's address, http://HOST:PORT")
    return url.rstrip("/")


class ErrorAnswer(MissingRequirement):
    """A server answers, with an error."""


def ask(url: str, path: str, body: Mapping[str, object] | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """The answer to GET, or to POST with a `body`.

    Raises:
        MissingRequirement: no server answers, or it answers with an error; says which.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found: bytes = answer.read()
            return found
    except urllib.error.HTTPError as error:
        reply = error.read(300).decode(errors="replace").strip()
        raise ErrorAnswer(
            f"{url}{path}: expected an answer, got HTTP {error.code}: {reply or 'nothing more'}"
        ) from None
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise MissingRequirement(
            f"{url}{path}: no server answers ({why}); start one, for example with `kda llm serve`"
        ) from None


def served_models(url: str) -> list[str]:
    """Names that the server lists; none where it lists nothing, as `transformers serve` may.

    Raises:
        MissingRequirement: as `ask`, or the answer is no list of models.
    """
    answer = ask(url, "/v1/models")
    try:
        return [str(one["id"]) for one in json.loads(answer)["data"]]
    except (ValueError, KeyError, TypeError):
        raise MissingRequirement(
            f"{url}/v1/models: expected an OpenAI-like list of models, got {answer[:80]!r}; is it such a server?"
        ) from None


def owner(url: str) -> str:
    """The models' owner as the server reports it: the engine's name for SGLang and vLLM. "unknown" if it has none."""
    try:
        return str(json.loads(ask(url, "/v1/models"))["data"][0]["owned_by"])
    except (ValueError, KeyError, IndexError, TypeError):
        return "unknown"


def demand_tokens(url: str, model: str) -> None:
    """Ask for a completion of one token, to find a wrong model or a broken server before the load.

    Raises:
        UsageError: the server lists models, but not this one.
        MissingRequirement: as `ask`, or the answer has no completion.
    """
    names = served_models(url)
    if names and model not in names:
        raise UsageError(f"--model {model}: expected a model that {url} serves: {', '.join(names)}")
    body = {"model": model, "prompt": "a", "max_tokens": 1, "stream": False}
    answer = ask(url, "/v1/completions", body, FIRST_ANSWER_S)
    try:
        fine = bool(json.loads(answer)["choices"])
    except (ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise MissingRequirement(f"{url}/v1/completions: expected a completion, got {answer[:80]!r}")


def alive(url: str) -> bool:
    """Whether a server answers, even with an error."""
    try:
        ask(url, "/health", timeout_s=5.0)
    except ErrorAnswer:
        return True
    except MissingRequirement:
        return False
    return True


def gauges(url: str, names: tuple[str, ...]) -> dict[str, float]:
    """Gauges of the server's Prometheus page, read once and summed over their labels; missing ones are left out.

    Raises:
        MissingRequirement: as `ask`.
    """
    found: dict[str, float] = {}
    for line in ask(url, "/metrics").decode(errors="replace").splitlines():
        name = re.split(r"[{\s]", line, maxsplit=1)[0]
        if name in names:
            rest = line.rpartition("}")[2] if "{" in line else line.partition(" ")[2]
            found[name] = found.get(name, 0.0) + float(rest.split()[0])
    return found


def wait_until(question: Callable[[], bool], seconds: float, every_s: float = 0.5) -> bool:
    """Ask `question()` repeatedly; whether it was true within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        if question():
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(every_s)
