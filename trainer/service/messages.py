"""What the API takes and answers, typed; :mod:`trainer.service.views` has what describes a run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trainer.service import views


class Failure(BaseModel):
    """Why a request is refused: a sentence."""

    error: str


class NewRun(BaseModel):
    """A run to submit. ``overrides``: as of ``trainer.run``. ``key``: the same key of this token is the same run."""

    model_config = ConfigDict(extra="forbid")
    overrides: list[Annotated[str, Field(max_length=1000)]] = Field(
        max_length=100, examples=[["+recipe=digits_lenet", "epochs=2"]]
    )
    key: str | None = Field(None, min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._:-]+$")
    priority: int = Field(0, ge=-100, le=100)


class Submitted(BaseModel):
    """The run that a submission has made, or had made before with the same key."""

    number: int
    new: bool


class Said(BaseModel):
    """What was done: a sentence."""

    said: str


class Login(BaseModel):
    """A token, for the page."""

    token: str = Field(max_length=200)


class Session(BaseModel):
    """Who is logged in, and what the page sends as ``x-csrf-token``."""

    name: str
    csrf: str


class Choices(BaseModel):
    """What can be submitted: recipes with their descriptions, and options by group."""

    recipes: dict[str, str]
    groups: dict[str, list[str]]


class State(BaseModel):
    """The queue: hosts, and runs; first those that wait or live, in the order in which they start."""

    hosts: list[views.HostView]
    runs: list[views.RunView]


class PointsView(BaseModel):
    """Points of a run, and the ``after`` that asks for later ones. ``start``: 0 where the file began anew."""

    points: list[dict[str, Any]]
    start: int
    next: int


class FileView(BaseModel):
    """A file of a run: bytes, and seconds since 1970."""

    path: str
    size: int
    modified: float
