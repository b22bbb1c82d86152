"""What the tests' W&B server holds, and its answers to the operations that the pinned client asks for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ENTITY = "loopback"

Json = dict[str, Any]


@dataclass
class StoredRun:
    """One run as it arrived."""

    fields: Json = field(default_factory=dict)
    history: list[Json] = field(default_factory=list)
    summary: Json = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    complete: bool = False

    @property
    def config(self) -> Json:
        """Return the config as the user gave it; the client wraps each value."""
        wrapped = json.loads(self.fields.get("config") or "{}")
        return {name: entry["value"] for name, entry in wrapped.items() if name != "_wandb"}

    @property
    def metric_definitions(self) -> list[Json]:
        """Return the `define_metric`s; protobuf fields by number: 1 name, 5 index of the step metric + 1."""
        return json.loads(self.fields["config"])["_wandb"]["value"]["m"]

    @property
    def rows(self) -> list[Json]:
        """Return the history without the client's own columns."""
        return [
            {name: value for name, value in row.items() if not name.startswith("_")} for row in self.history
        ]


@dataclass
class StoredArtifact:
    """One version of an artifact as it arrived."""

    fields: Json
    state: str = "PENDING"
    manifest: Json = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.fields["artifactCollectionName"])


class Store:
    """Everything that arrived."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs: dict[str, StoredRun] = {}
        self.artifacts: list[StoredArtifact] = []
        self.views: dict[str, Json] = {}
        self.projects: set[str] = {"rlsp"}


class NotThereError(LookupError):
    """Say in the server's words that something does not exist or may not be seen."""


def _gid(kind: str, key: object) -> str:
    return base64.b64encode(f"{kind}:{key}".encode()).decode()


def _number(gid: str) -> int:
    return int(base64.b64decode(gid).decode().rpartition(":")[2])


def _viewer(server: Store, asked: Json) -> Json:
    teams = {"edges": [{"node": {"name": ENTITY}}]}
    viewer = {"id": _gid("User", 1), "entity": ENTITY, "username": ENTITY, "email": "", "admin": False}
    return {"viewer": {**viewer, "flags": "{}", "teams": teams, "apiKeys": {"edges": []}}}


def _project(server: Store, name: str) -> Json:
    server.projects.add(name)
    return {"id": _gid("Project", name), "name": name, "entity": {"id": _gid("Entity", 1), "name": ENTITY}}


def _require_entity(asked: Json, key: str = "entityName") -> None:
    if asked.get(key) not in (None, "", ENTITY):
        raise NotThereError(f"entity {asked[key]} not found during {key} lookup")


def _upsert_run(server: Store, asked: Json) -> Json:
    _require_entity(asked, "entity")
    inserted = asked["name"] not in server.runs
    run = server.runs.setdefault(asked["name"], StoredRun())
    run.fields.update({key: value for key, value in asked.items() if value is not None})
    bucket = {
        "id": _gid("Run", asked["name"]),
        "name": asked["name"],
        "displayName": run.fields.get("displayName"),
        "description": None,
        "config": run.fields.get("config"),
        "sweepName": None,
        "project": _project(server, run.fields["project"]),
        "historyLineCount": len(run.history),
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}


def _resume_status(server: Store, asked: Json) -> Json:
    run = server.runs.get(asked["name"])
    if run is None:
        return {"model": {**_project(server, asked["project"]), "bucket": None}}
    bucket = {
        "id": _gid("Run", asked["name"]),
        "name": asked["name"],
        "summaryMetrics": json.dumps(run.summary),
        "displayName": run.fields.get("displayName"),
        "logLineCount": 0,
        "historyLineCount": len(run.history),
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
        "eventsTail": "[]",
        "config": run.fields.get("config"),
        "tags": run.fields.get("tags"),
        "notes": None,
        "wandbConfig": '{"t": 1}',
    }
    return {"model": {**_project(server, asked["project"]), "bucket": bucket}}


def _run_files(server: Store, asked: Json) -> Json:
    files = [{"name": n, "uploadUrl": f"{server.url}/upload-run/{asked['run']}/{n}"} for n in asked["files"]]
    return {"createRunFiles": {"runID": _gid("Run", asked["run"]), "uploadHeaders": [], "files": files}}


def _create_artifact(server: Store, asked: Json) -> Json:
    server.artifacts.append(StoredArtifact(asked["input"]))
    index = len(server.artifacts) - 1
    artifact = {
        "id": _gid("Artifact", index),
        "state": "PENDING",
        "artifactSequence": {"latestArtifact": None},
    }
    return {"createArtifact": {"artifact": artifact}}


def _artifact_manifest(server: Store, asked: Json) -> Json:
    index = _number(asked["artifactID"])
    address = f"{server.url}/upload-manifest/{index}/{asked['name']}"
    file = {"id": _gid("File", index), "uploadUrl": address, "uploadHeaders": []}
    return {"createArtifactManifest": {"artifactManifest": {"id": _gid("Manifest", index), "file": file}}}


def _artifact_files(server: Store, asked: Json) -> Json:
    edges = []
    for file in asked["input"]["artifactFiles"]:
        index = _number(file["artifactID"])
        node = {
            "storagePath": f"{index}/{file['name']}",
            "uploadUrl": f"{server.url}/upload-artifact/{index}/{file['name']}",
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
            "artifact": {"id": file["artifactID"]},
        }
        edges.append({"node": node})
    return {"createArtifactFiles": {"files": {"edges": edges}}}


def _commit_artifact(server: Store, asked: Json) -> Json:
    artifact = server.artifacts[_number(asked["artifactID"])]
    artifact.state = "COMMITTED"
    return {"commitArtifact": {"artifact": {"id": asked["artifactID"], "digest": artifact.fields["digest"]}}}


def _find_project(server: Store, asked: Json) -> Json:
    if asked["entityName"] != ENTITY or asked["projectName"] not in server.projects:
        return {"project": None}
    return {
        "project": {"id": _gid("Project", asked["projectName"]), "internalId": _gid("ProjectInternalId", 7)}
    }


def _find_view(server: Store, asked: Json) -> Json:
    found = [{"node": view} for view in server.views.values() if view["name"] == asked["viewName"]]
    return {"project": {"allViews": {"edges": found}}}


def _upsert_view(server: Store, asked: Json) -> Json:
    inserted = not asked.get("id")
    gid = asked.get("id") or _gid("View", len(server.views) + 1)
    project = {**_project(server, asked["projectName"]), "entityName": ENTITY}
    server.views[gid] = {**asked, "id": gid, "project": project, "updatedAt": "2026-01-02T03:04:05"}
    return {"upsertView": {"view": server.views[gid], "inserted": inserted}}


def _list_projects(server: Store, asked: Json) -> Json:
    more = {"entityName": ENTITY, "createdAt": "2026-01-02T03:04:05", "isBenchmark": False, "user": None}
    edges = [{"node": {**_project(server, name), **more}, "cursor": name} for name in sorted(server.projects)]
    return {"models": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}}


ANSWERS: dict[str, Callable[[Store, Json], Json]] = {
    "Viewer": _viewer,
    "OrganizationCoreWeaveOrganizationID": lambda server, asked: {"entity": {"organization": None}},
    "ServerFeaturesQuery": lambda server, asked: {"serverInfo": {"features": []}},
    "UpsertBucket": _upsert_run,
    "RunResumeStatus": _resume_status,
    "CreateRunFiles": _run_files,
    "ArtifactType": lambda server, asked: {"project": {"artifact": None}},
    "CreateArtifact": _create_artifact,
    "CreateArtifactManifest": _artifact_manifest,
    "CreateArtifactFiles": _artifact_files,
    "CommitArtifact": _commit_artifact,
    "ProjectInternalId": _find_project,
    "View": _find_view,
    "UpsertView2": _upsert_view,
    "upsertView": _upsert_view,
    "GetProjects": _list_projects,
}
