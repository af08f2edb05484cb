"""The HTTP service: POST /recommend and /similar, GET /health, /metrics, /openapi.json, /items and a page to try it.

Every answer comes from one export, which it names. What cannot be answered gets a 4xx or 503 and one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from turbogr import __version__
from turbogr.exports.standalone import RequestError, shown
from turbogr.serving.live_export import LiveExport
from turbogr.serving.request_body import Limits, RecommendBody, SimilarBody, read_recommend, read_similar, schemas
from turbogr.serving.request_queue import Overloaded, RequestQueue

log = logging.getLogger("turbogr.serving")
_PAGE = Path(__file__).with_name("page.html")
_MOST_SEARCHED = 1_000_000  # items whose titles are searched for the page
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Service:
    """The application (`app`) around an export; the export is looked at every `reload_seconds`."""

    def __init__(
        self, live: LiveExport, *, limits: Limits | None = None, reload_seconds: float = 2.0, most_waiting: int = 1024
    ) -> None:
        self.live, self.limits, self._reload_seconds = live, limits or Limits(), reload_seconds
        self.queue = RequestQueue(self._compute, most_waiting=most_waiting)
        self._metrics = CollectorRegistry()
        self._requests = Counter(
            "turbogr_requests", "Requests by path and status.", ["path", "status"], registry=self._metrics
        )
        self._seconds = Histogram(
            "turbogr_request_seconds", "Time to answer.", ["path"], buckets=_SECONDS, registry=self._metrics
        )
        self._batches = Histogram(
            "turbogr_batch_histories", "Histories computed at once.", buckets=_SIZES, registry=self._metrics
        )
        Gauge("turbogr_waiting_requests", "Requests that wait.", registry=self._metrics).set_function(
            lambda: self.queue.num_waiting
        )
        self._reloads = Counter(
            "turbogr_reloads", "New exports, by whether they are served.", ["result"], registry=self._metrics
        )
        self._info = Gauge("turbogr_export_info", "The export that is served.", ["version"], registry=self._metrics)
        self._info.labels(live.current.version).set(1)
        self._stopping = asyncio.Event()
        self._reload_asked = False
        routes = [
            Route("/", self._page),
            Route("/recommend", self._timed("/recommend", self._recommend), methods=["POST"]),
            Route("/similar", self._timed("/similar", self._similar), methods=["POST"]),
            Route("/items", self._timed("/items", self._items)),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._openapi),
        ]
        handlers: Any = {HTTPException: _refused, Exception: _failed}
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    def ask_for_reload(self) -> None:
        """Open the export at the next look even if it has not changed since one was refused."""
        self._reload_asked = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._stopping.set()
            await watching
            await self.queue.close()

    async def _watch(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._reload_seconds)
                return
            again, self._reload_asked = self._reload_asked, False
            before = self.live.current.version
            served = await asyncio.to_thread(self.live.reload_if_changed, again=again)
            if served is None:
                continue
            self._reloads.labels("served" if served else "refused").inc()
            if served:
                self._info.remove(before)
                self._info.labels(self.live.current.version).set(1)
                log.info("now serving the version %s", self.live.current.version[:12])
            else:
                log.error("%s", self.live.problem)

    def _timed(
        self, path: str, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def timed(request: Request) -> Response:
            start = time.perf_counter()
            status = 500
            try:
                response = await answer(request)
                status = response.status_code
            except RequestError as error:
                response = _sentence(str(error), status := 422)
            except _TooLarge as error:
                response = _sentence(str(error), status := 413)
                response.headers["connection"] = "close"  # else the rest of the body would be read
            except Overloaded:
                response = _sentence("too many requests wait; try again in a second", status := 503)
                response.headers["retry-after"] = "1"
            finally:
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.perf_counter() - start)
            return response

        return timed

    async def _recommend(self, request: Request) -> Response:
        body = read_recommend(await self._body(request), self.limits)
        return Response(await self.queue.submit(body, body.size), media_type="application/json")

    async def _similar(self, request: Request) -> Response:
        body = read_similar(await self._body(request), self.limits)
        return Response(await self.queue.submit(body, body.size), media_type="application/json")

    async def _body(self, request: Request) -> bytes:
        """Return the body, which is read no further than the limit."""
        most = self.limits.body_bytes
        announced = request.headers.get("content-length", "0")
        parts, size = [], 0
        if not announced.isdigit() or int(announced[:20]) <= most:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    break
                parts.append(part)
            else:
                return b"".join(parts)
        raise _TooLarge(f"the body has more than {most:,} bytes; send fewer histories at once")

    def _compute(self, jobs: Sequence[RecommendBody | SimilarBody]) -> list[Any]:
        """Answer a batch of requests with the export of now: encoded answers, or an error for a request."""
        export = self.live.current
        self._batches.observe(sum(job.size for job in jobs))
        answers: list[Any] = [None] * len(jobs)
        histories: list[Any] = []
        ks: list[int] = []
        seens: list[bool | None] = []
        alloweds: list[Any] = []
        places: dict[int, slice] = {}
        for number, job in enumerate(jobs):
            try:
                if isinstance(job, SimilarBody):
                    answers[number] = _similar_answer(export, job)
                    continue
                allowed = export.candidates(job.include, job.exclude)
                if job.histories is not None:
                    read = [export.read_history(history, at=job.at) for history in job.histories]
                else:
                    read = [export.history_of_user(user, at=job.at) for user in job.users or ()]
            except RequestError as error:
                answers[number] = error
                continue
            places[number] = slice(len(histories), len(histories) + len(read))
            histories += read
            ks += [min(job.k, export.num_items)] * len(read)
            seens += [job.filter_seen] * len(read)
            alloweds += [allowed] * len(read)
        found = export.best(histories, ks, filter_seen=seens, allowed=alloweds)
        for number, place in places.items():
            lists = [
                {"items": _items_of(export, *ranked), "unknown": history.unknown}
                for ranked, history in zip(found[place], histories[place], strict=True)
            ]
            answers[number] = _encoded(export, lists)
        return answers

    async def _items(self, request: Request) -> Response:
        """Items whose title or id contains a text, for the page."""
        export, query = self.live.current, request.query_params.get("query", "")
        if len(query) > 100:
            raise RequestError("query is longer than 100 characters")
        if export.num_items > _MOST_SEARCHED:
            raise RequestError(f"items are searched among at most {_MOST_SEARCHED:,}; type ids instead")
        rows = await asyncio.to_thread(export.find_items, query, 10)
        items = zip(export.names(rows), export.titles(rows), strict=True)
        return JSONResponse({"items": [{"item": item, "title": title} for item, title in items]})

    async def _health(self, request: Request) -> Response:
        export = self.live.current
        facts: dict[str, Any] = {
            "status": "ok",
            "version": export.version,
            "delivered": export.facts["delivered"]["label"],
            "items": export.num_items,
            "search": export.search,
            "users": export.has_users,
            "similar": export.vectors is not None,
            "titles": export.has_titles,
        }
        if self.live.problem is not None:
            facts["reload_problem"] = self.live.problem
        return JSONResponse(facts)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self.limits))


class _TooLarge(Exception):
    """The body of a request is larger than the limit."""


def _similar_answer(export: Any, job: SimilarBody) -> bytes:
    rows = [export.row(item) for item in job.items]
    found = export.similar_rows(rows, min(job.k, export.num_items), allowed=export.candidates(job.include, job.exclude))
    return _encoded(export, [{"items": _items_of(export, *ranked)} for ranked in found])


def _items_of(export: Any, rows: Any, scores: Any) -> list[dict[str, Any]]:
    pairs = zip(export.names(rows), scores.tolist(), strict=True)
    found = [{"item": item, "score": score} for item, score in pairs]
    if export.has_titles:
        for entry, title in zip(found, export.titles(rows), strict=True):
            entry["title"] = title
    return found


def _encoded(export: Any, lists: list[dict[str, Any]]) -> bytes:
    return json.dumps({"version": export.version, "lists": lists}, separators=(",", ":")).encode()


def _sentence(text: str, status: int) -> Response:
    return JSONResponse({"error": text}, status)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {
        404: f"there is nothing at {shown(request.url.path)}; see /openapi.json",
        405: f"{request.method} is not for {shown(request.url.path)}; see /openapi.json",
    }
    return _sentence(texts.get(error.status_code, error.detail), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return _sentence("this request could not be answered; the log of the service says why", 500)


def openapi(limits: Limits) -> dict[str, Any]:
    """Return the description of the service for machines."""

    def reference(name: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    errors = {
        status: {"description": meaning, "content": reference("Error")}
        for status, meaning in (
            ("413", "the body is too large"),
            ("422", "something in the body is wrong; the sentence says what"),
            ("503", "too many requests wait"),
        )
    }

    def post(summary: str, body: str) -> dict[str, Any]:
        lists = {"description": "a list per history, user or item", "content": reference("Lists")}
        request = {"required": True, "content": reference(body)}
        return {"post": {"summary": summary, "requestBody": request, "responses": {"200": lists, **errors}}}

    def get(summary: str, content: str) -> dict[str, Any]:
        return {"get": {"summary": summary, "responses": {"200": {"description": summary, "content": {content: {}}}}}}

    query = {"name": "query", "in": "query", "schema": {"type": "string", "maxLength": 100}}
    items = get("items whose title or id contains a text", "application/json")
    items["get"]["parameters"] = [query]
    return {
        "openapi": "3.1.0",
        "info": {"title": "TurboGR recommendations", "version": __version__},
        "paths": {
            "/recommend": post("the best items for histories or users", "Recommend"),
            "/similar": post("the items closest to items", "Similar"),
            "/items": items,
            "/health": get("what is served", "application/json"),
            "/metrics": get("metrics in the text form of Prometheus", "text/plain"),
        },
        "components": {"schemas": schemas(limits)},
    }
