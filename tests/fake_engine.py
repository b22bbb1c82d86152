"""Speak an external engine's protocol without being one: `python fake_engine.py ACT`. No library at all."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

VOCABULARY = 97
LOGP = -4.5
Rows = list[list[Any]]

BAD_LOGP: dict[str, Any] = {"nan": math.nan, "infinite": -math.inf, "positive": 0.5, "no_number": "high"}
BAD_TOKEN: dict[str, Any] = {"out_of_range": VOCABULARY, "no_token": 3.0}
BAD_LENGTH: dict[str, Callable[[Rows, Rows], tuple[Rows, Rows]]] = {
    "too_few": lambda rows, logp: ([rows[0], rows[1][:2], *rows[2:]], [logp[0], logp[1][:2], *logp[2:]]),
    "too_many": lambda rows, logp: (
        [rows[0], [*rows[1], 3], *rows[2:]],
        [logp[0], [*logp[1], LOGP], *logp[2:]],
    ),
    "unpaired": lambda rows, logp: (rows, [logp[0], logp[1][:-1], *logp[2:]]),
    "lost": lambda rows, logp: (rows[1:], logp[1:]),
}


def drawn(request: dict[str, Any], act: str) -> dict[str, Any]:
    stop = request["stop"]
    rows: Rows = []
    for _, limit, seed in request["requests"]:
        row = [(seed + place) % VOCABULARY for place in range(limit)]
        ends = [place for place, token in enumerate(row) if token in stop]
        rows.append(row[: ends[0] + 1] if ends else row)
    logp: Rows = [[LOGP - 0.001 * token for token in row] for row in rows]
    if act in BAD_LOGP:
        logp[1][2] = BAD_LOGP[act]
    if act in BAD_TOKEN:
        rows[1][2] = BAD_TOKEN[act]
    if act in BAD_LENGTH:
        rows, logp = BAD_LENGTH[act](rows, logp)
    if act == "goes_on":
        rows[1][0] = stop[0]
    if act == "no_rows":
        return {"version": request["version"]}
    if act == "no_version":
        return {"tokens": rows, "logp": logp}
    return {"version": request["version"] + (act == "another_version"), "tokens": rows, "logp": logp}


def loaded(request: dict[str, Any], digest: str, act: str) -> dict[str, Any]:
    with open(request["folder"] + "/config.json") as file:
        json.load(file)
    match act:
        case "stale":
            digest = digest[::-1]
        case "no_digest":
            digest = "everything is fine"
    version = request["version"] - (act == "older")
    return {"version": version, "digest": digest, "found": 3, "elements": 4}


def answer(line: str, digest: str, act: str) -> str:
    request = json.loads(line)
    if request["do"] == "load":
        return json.dumps(loaded(request, digest, act))
    match act:
        case "garbage":
            return "INFO: drawing, please wait"
        case "list":
            return "[1, 2]"
        case "fault":
            return json.dumps({"fault": "ValueError: no such thing", "details": ["where it", "happened"]})
        case "exit":
            print("out of memory", file=sys.stderr)
            sys.exit(7)
        case "killed":
            os.abort()
        case "hang":
            time.sleep(600)
        case "slow":
            time.sleep(3)
    return json.dumps(drawn(request, act))


def main(act: str) -> None:
    opening = json.loads(sys.stdin.readline())
    if act == "cannot_start":
        print("Traceback: no module named vllm", file=sys.stderr)
        sys.exit(1)
    if act == "refuses_to_start":
        print(json.dumps({"fault": "ImportError: no module named vllm", "details": []}), flush=True)
        sys.exit(1)
    print(json.dumps({"ready": True, "max_tokens": 20 if act == "small" else 1000}), flush=True)
    for line in sys.stdin:
        print(answer(line, opening["digest"], act), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
