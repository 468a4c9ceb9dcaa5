"""The API of the queue: submit, list, follow and end runs over HTTP (``python -m trainer serve``).

Routes are thin: :mod:`trainer.service.guard` has let a request in, :mod:`trainer.service.views` describes runs, and
:mod:`trainer.service.submitting` starts ``python -m trainer submit``. Each request opens the queue for itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from trainer.config import redact
from trainer.errors import RunFailed, UserError, why
from trainer.service import run_files, views
from trainer.service.guard import Guard, below
from trainer.service.messages import (
    Choices,
    Failure,
    FileView,
    Login,
    NewRun,
    PointsView,
    Said,
    Session,
    State,
    Submitted,
)
from trainer.service.queue import ALIVE, OVER, WAITING, Queue, Run
from trainer.service.queue import Slots as OfQueue
from trainer.service.submitting import AT_A_TIME, Busy, Submitter, queue_of
from trainer.service.tokens import Caller, Tokens
from trainer.version import __version__

LONG = 2**63 - 1
PAGE = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "curves.js": "text/javascript",
}
WITHOUT_TOKEN = ("", "/login", "/logout", *(f"/{name}".replace("/page.html", "/") for name in PAGE))
SHOWN = 100
TICK_S, ALIVE_S, MOST_STREAMS = 1.0, 15.0, 32
"""A stream polls and says that it lives so often; so many streams of a token at a time."""
MOST_WAITING = 100
"""Submissions that wait for those before them."""
MAY_SUFFER = 5
"""Seconds after which a refused request may be sent again."""


@dataclass
class Service:
    """What the routes share.

    Attributes:
        home: folder of the queue. slots: of this host. choices: of the configured folders. submitter: puts runs into
        the queue. act: does ``cancel``, ``resume`` or ``retry``, and returns what to say. cookie: the login's name.
    """

    home: Path
    tokens: Tokens
    slots: OfQueue
    choices: Choices
    submitter: Submitter
    act: Callable[[Queue, str, Run], str]
    cookie: str
    streams: dict[str, int] = field(default_factory=dict)
    submitting: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(AT_A_TIME))

    @contextmanager
    def queue(self) -> Iterator[Queue]:
        """Context manager: the queue, for one request in its thread."""
        with queue_of(self.home) as queue:
            yield queue

    def run(self, queue: Queue, number: int) -> Run:
        """Return a run.

        Raises:
            HTTPException: there is none (404).
        """
        if (run := queue.run(number)) is None:
            raise HTTPException(404, f"there is no run {number}")
        views.learn(queue, run)
        return run

    def state(self, caller: Caller, limit: int) -> State:
        """Describe the queue, with so many runs that are over."""
        with self.queue() as queue:
            waiting, alive = queue.in_states(WAITING), queue.in_states(ALIVE)
            over = [run for run in queue.newest(limit) if run.state in OVER]
            for run in (*waiting, *alive, *over):
                views.learn(queue, run)
        order = [run.number for run in waiting]
        runs = [views.view(run, caller, order) for run in (*alive, *waiting, *reversed(over))]
        return State(hosts=[views.host(self.slots, alive)], runs=runs)


def _service(request: Request) -> Service:
    return request.app.state.service  # type: ignore[no-any-return]


def _caller(request: Request) -> Caller:
    return request.state.caller  # type: ignore[no-any-return]


TheService = Annotated[Service, Depends(_service)]
TheCaller = Annotated[Caller, Depends(_caller)]
Number = Annotated[int, InPath(ge=1, le=LONG, description="number of the run in the queue")]
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": Failure, "description": text}
    for code, text in (
        (400, "The request cannot be read"),
        (401, "No token, or a revoked one"),
        (403, "Not for this caller, host or site"),
        (404, "No such run or file"),
        (413, "The body is too large"),
        (422, "A value is not accepted, or the command line would be refused"),
    )
}
SLOWER: dict[int | str, dict[str, Any]] = {
    code: {"model": Failure, "description": text}
    for code, text in ((409, "Its state does not allow it"), (429, "The quota is used up"), (503, "Try again later"))
}
api = APIRouter(prefix="/api", responses=REFUSALS)
door = APIRouter(include_in_schema=False)


@api.get("/runs")
def list_runs(service: TheService, caller: TheCaller, limit: Annotated[int, Query(ge=1, le=10_000)] = SHOWN) -> State:
    """List runs: all that wait or live, and those of the newest ``limit`` that are over; and the slots by host."""
    return service.state(caller, limit)


@api.post("/runs", status_code=201, responses={**SLOWER, 200: {"model": Submitted, "description": "The key is known"}})
async def submit(service: TheService, caller: TheCaller, new: NewRun, response: Response) -> Submitted:
    """Submit a run, as ``python -m trainer submit`` does. What would be refused is refused here."""
    if (waiting := service.submitting.statistics().tasks_waiting) >= MOST_WAITING:
        raise Busy(503, f"{waiting} submissions wait")
    number, made = await to_thread.run_sync(
        service.submitter.submit, caller, new.overrides, new.key, new.priority, limiter=service.submitting
    )
    response.status_code = 201 if made else 200
    return Submitted(number=number, new=made)


@api.get("/runs/{number}")
def show(service: TheService, caller: TheCaller, number: Number) -> views.RunDetail:
    """Show a run: its state, config, result and pictures."""
    with service.queue() as queue:
        order = [run.number for run in queue.in_states(WAITING)]
        return views.detail(service.run(queue, number), caller, order)


@api.post("/runs/{number}/cancel", responses=SLOWER)
def cancel(service: TheService, caller: TheCaller, number: Number) -> Said:
    """End a run; one that has begun saves a checkpoint first."""
    return _act(service, caller, "cancel", number)


@api.post("/runs/{number}/resume", responses=SLOWER)
def resume(service: TheService, caller: TheCaller, number: Number) -> Said:
    """Queue a run again after its end; it goes on from its newest checkpoint."""
    return _act(service, caller, "resume", number)


@api.post("/runs/{number}/retry", responses=SLOWER)
def retry(service: TheService, caller: TheCaller, number: Number) -> Said:
    """Queue a run again after its end, from the start."""
    return _act(service, caller, "retry", number)


def _act(service: Service, caller: Caller, verb: str, number: int) -> Said:
    with service.queue() as queue:
        run = service.run(queue, number)
        if not caller.owner and views.by(run) != caller.name:
            raise HTTPException(403, f"run {number} is not of the token {caller.name}")
        if verb != "cancel":
            service.submitter.check_quota(caller)
        try:
            return Said(said=service.act(queue, verb, run))
        except UserError as error:
            raise HTTPException(409, str(error)) from error


@api.get("/runs/{number}/metrics")
def metrics(service: TheService, number: Number, after: Annotated[int, Query(ge=0, le=LONG)] = 0) -> PointsView:
    """Return the points of a run, oldest first, at most 4 MiB of them; ask again with ``after`` = ``next``."""
    with service.queue() as queue:
        run = service.run(queue, number)
    found = run_files.points(Path(run.folder), after, views.known(run))
    return PointsView(points=found.points, start=found.start, next=found.next)


@api.get("/runs/{number}/files")
def files(service: TheService, number: Number) -> list[FileView]:
    """List the files of a run's folder, at most 2000."""
    with service.queue() as queue:
        run = service.run(queue, number)
    return [FileView(**redact.hide(vars(one), views.known(run))) for one in run_files.listed(Path(run.folder))]


@api.get("/runs/{number}/files/{path:path}", response_class=Response)
def file(service: TheService, number: Number, path: str) -> Response:
    """Return a file of a run's folder; of a text with secrets redacted. Links are not followed."""
    with service.queue() as queue:
        run = service.run(queue, number)
    try:
        opened = run_files.opened(Path(run.folder), path)
    except run_files.NoSuchFile:
        raise HTTPException(404, "there is no such file in the run's folder") from None
    suffix = PurePosixPath(path).suffix.lower()
    is_text = suffix in run_files.TEXTS or PurePosixPath(path).stem == "workerlog"
    kind = run_files.PICTURES.get(suffix, "text/plain; charset=utf-8" if is_text else "application/octet-stream")
    shown = "inline" if is_text or suffix in run_files.PICTURES else "attachment"
    return StreamingResponse(
        run_files.content(opened, is_text, views.known(run)), media_type=kind, headers={"content-disposition": shown}
    )


@api.get("/runs/{number}/logs", response_class=Response)
async def logs(
    request: Request,
    service: TheService,
    caller: TheCaller,
    number: Number,
    follow: bool = False,
    last: Annotated[int | None, Query(ge=0, le=LONG, description="bytes at the end; without it, all")] = None,
) -> Response:
    """Return the lines of a run; with ``follow`` as server-sent events until it ends: ``line`` (a JSON text) and
    ``end`` (the run's state)."""

    def find() -> Run:
        with service.queue() as queue:
            return service.run(queue, number)

    run = await asyncio.to_thread(find)
    tail = run_files.Tail(*run_files.log_of(run), views.known(run), last)

    def whole() -> Iterator[str]:
        while lines := tail.lines(over=True):
            yield "".join(f"{line}\n" for line in lines)

    if not follow:
        return StreamingResponse(whole(), media_type="text/plain; charset=utf-8")

    def poll() -> tuple[list[tuple[str, Any]], bool]:
        now = find()
        over = now.state in OVER
        lines = tail.lines(over)
        ended = over and tail.ended()
        return [*(("line", line) for line in lines), *([("end", now.state)] if ended else [])], ended

    return _stream(request, service, caller, poll)


@api.get("/events", response_class=Response)
async def events(request: Request, service: TheService, caller: TheCaller) -> Response:
    """Server-sent events: ``runs``, what ``GET /api/runs`` answers, at the beginning and whenever it changes."""
    before = ""

    def poll() -> tuple[list[tuple[str, Any]], bool]:
        nonlocal before
        now = service.state(caller, SHOWN).model_dump()
        if (text := json.dumps(now)) == before:
            return [], False
        before = text
        return [("runs", now)], False

    return _stream(request, service, caller, poll)


@api.get("/choices")
def choices(service: TheService) -> Choices:
    """List the recipes and options that can be submitted."""
    return service.choices


def _stream(
    request: Request, service: Service, caller: Caller, poll: Callable[[], tuple[list[tuple[str, Any]], bool]]
) -> Response:
    """Answer with what ``poll`` returns, events and whether they have ended, until the token is revoked."""
    if service.streams.get(caller.name, 0) >= MOST_STREAMS:
        raise HTTPException(429, f"the token has {MOST_STREAMS} streams", {"retry-after": str(MAY_SUFFER)})

    async def send() -> AsyncIterator[str]:
        service.streams[caller.name] = service.streams.get(caller.name, 0) + 1
        try:
            spoke, ended = time.monotonic(), False
            yield ": begins\n\n"
            while not ended and not request.app.state.stopping() and caller.name in service.tokens.names():
                found, ended = await asyncio.to_thread(poll)
                for event, data in found:
                    yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
                if found or time.monotonic() - spoke > ALIVE_S:
                    spoke = time.monotonic()
                    yield ": lives\n\n"
                if not found:
                    await asyncio.sleep(TICK_S)
        finally:
            service.streams[caller.name] -= 1

    return StreamingResponse(send(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


@door.post("/login")
def login(request: Request, service: TheService, tried: Login, response: Response) -> Session:
    """Take a token for a cookie that no script can read, and a csrf value that no other site can."""
    caller = service.tokens.caller(tried.token.strip())
    if caller is None:
        raise HTTPException(401, "there is no such token, or it is revoked")
    cookie, csrf = service.tokens.login(caller)
    secure = request.headers.get("origin", "").startswith("https://")
    response.set_cookie(service.cookie, cookie, max_age=30 * 24 * 3600, httponly=True, samesite="strict", secure=secure)
    return Session(name=caller.name, csrf=csrf)


@door.post("/logout", status_code=204)
def logout(service: TheService, response: Response) -> None:
    """Remove the cookie from the browser."""
    response.delete_cookie(service.cookie, httponly=True, samesite="strict")


def page(request: Request) -> Response:
    """The page, which holds no data."""
    name = below(request.scope).strip("/") or "page.html"
    return Response(resources.files("trainer.service").joinpath("page", name).read_bytes(), media_type=PAGE.get(name))


for _name in PAGE:
    door.add_api_route(f"/{_name}".replace("/page.html", "/"), page)


def made(service: Service, hosts: Collection[str] = (), stopping: Callable[[], bool] = lambda: False) -> Guard:
    """Make the application: the API and the page behind the guard.

    Args:
        hosts: further names of this service, besides those of loopback. stopping: whether streams are to end.
    """
    app = FastAPI(title="trainer", version=__version__, docs_url=None, redoc_url=None)
    app.state.service, app.state.stopping = service, stopping
    app.include_router(api)
    app.include_router(door)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(AnyHTTPException, _refused)
    app.add_exception_handler(UserError, _wrong)
    app.add_exception_handler(Busy, _busy)
    app.add_exception_handler(RunFailed, _away)
    app.add_exception_handler(OSError, _away)
    return Guard(app, service.tokens, service.cookie, WITHOUT_TOKEN, hosts)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = [f"{'.'.join(str(part) for part in one.get('loc', ()))}: {one.get('msg')}" for one in error.errors()]
    return _answer(422, "; ".join(said[:5]))


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AnyHTTPException)
    return _answer(error.status_code, str(error.detail), dict(error.headers or {}))


def _wrong(request: Request, error: Exception) -> Response:
    return _answer(422, str(error))


def _away(request: Request, error: Exception) -> Response:
    """The disk is full, or the queue's file is locked: nothing is wrong with the request."""
    return _answer(503, f"not now: {why(error)}", {"retry-after": str(MAY_SUFFER)})


def _busy(request: Request, error: Exception) -> Response:
    assert isinstance(error, Busy)
    return _answer(error.status, str(error), {"retry-after": str(MAY_SUFFER)})


def _answer(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    shown = redact.text(sentence).encode(errors="backslashreplace").decode()
    return JSONResponse({"error": shown}, status, headers)
