"""``/live``, ``/vericache/status`` (JSON) and the status page at ``/vericache/``."""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from vericache.engine.metrics import PromMetrics
from vericache.engine.observe import LEGEND

router = APIRouter(tags=["VeriCache"])


@router.get("/live")
async def live() -> dict[str, str]:
    """This process answers. Whether the engine can run a step is ``/health``."""
    return {"status": "alive"}


@router.get("/vericache/status")
async def status(request: Request) -> dict[str, Any]:
    """Rings, requests, stores and the latest schedule, per engine, as of the engine's last step."""
    args = request.app.state.args
    return {
        "model": (args.served_model_name or [args.model])[0],
        "log_stats": not args.disable_log_stats,  # without, engines report nothing
        "legend": LEGEND,
        "engines": {str(index): found for index, found in sorted(PromMetrics.latest_status.items())},
    }


@router.get("/vericache", include_in_schema=False)
async def page_without_slash() -> RedirectResponse:
    return RedirectResponse("vericache/")


@router.get("/vericache/", include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(files("server").joinpath("page.html").read_text(encoding="utf-8"))
