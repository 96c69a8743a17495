"""`ctl expert-load`: how the experts of a group are loaded, and how evenly its ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.heat_map import shares, text_map, write_png
from ctl.admin.message_dict import message_dict
from ctl.base.output import Output, make_console, show
from ctl.base.tables import make_table
from proto import experts_pb2, router_pb2

_MAX_LAYER = 10_000

Group = Annotated[
    str,
    typer.Option(
        help="Name of the expert group; default: the only one of several ranks",
        show_default=False,
    ),
]
Layers = Annotated[
    str,
    typer.Option(
        help="Layers of the model, such as 3,7-9; default: all with experts", show_default=False
    ),
]


@admin_command
async def expert_load(
    admin: AdminConnection,
    group: Group = "",
    layers: Layers = "",
    output: Output = "table",
    show_map: Annotated[
        bool, typer.Option("--map", help="Show the load of each expert as a heat map")
    ] = False,
    heat_map: Annotated[
        Path | None, typer.Option(help="Write the heat map into this PNG file", show_default=False)
    ] = None,
    dump_placement: Annotated[
        Path | None,
        typer.Option(
            help="Write the placement in force into this file, for --expert-placement",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Shows the load of experts in the last window, and how evenly it falls on the ranks."""
    chosen = parse_layers(layers)
    if dump_placement is not None and chosen:
        raise ValueError("--dump-placement is of all layers: leave --layers out")
    load = await get_load(admin, group, chosen)
    rows = shares([(layer["layer"], layer["tokens"]) for layer in load["layers"]])
    if heat_map is not None:
        _write(heat_map, lambda file: write_png(rows, file, _title(load)))
    if dump_placement is not None:
        _write(dump_placement, lambda file: file.write_text(_placement_json(load), "utf-8"))
    show(load, output, _print)
    if show_map and rows and output == "table":
        console = make_console()
        console.print()
        console.print(text_map(rows, console.width, colours=console.color_system is not None))


def parse_layers(text: str) -> list[int]:
    """ "3,7-9" as numbers, each once, ascending; none for "". Raises ValueError."""
    layers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and int(end) <= _MAX_LAYER for end in ends):
            raise ValueError(f"--layers: {part!r} is no layer and no range of layers")
        if int(ends[0]) > int(ends[1]):
            raise ValueError(f"--layers: {part!r} ends before it begins")
        layers.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(layers)


async def get_load(admin: AdminConnection, group: str, layers: list[int]) -> dict[str, Any]:
    """As plain data; `balancedness` is the mean over all layers, 1 where there are none. Raises
    EpserveError."""
    wanted = experts_pb2.GetLoadRequest(layers=layers)
    request = router_pb2.GroupExpertLoadRequest(group=group, load=wanted)
    load = await admin.call(admin.stub.GetExpertLoad, request)
    balancedness = [layer.balancedness for layer in load.layers] or [1.0]
    return message_dict(load) | {"balancedness": round(fmean(balancedness), 6)}


def _placement_json(load: dict[str, Any]) -> str:
    """The dump format of placements, which workers start from."""
    placement = {
        "format": "epserve-expert-placement",
        "version": 1,
        **{key: load[key] for key in ("num_ranks", "slots_per_rank", "num_logical")},
        "physical_to_logical": [layer["physical_to_logical"] for layer in load["layers"]],
    }
    return json.dumps(placement)


def _print(load: dict[str, Any], console: Console) -> None:
    """A line a layer."""
    console.print(_title(load))
    if not load["layers"]:
        console.print("the model has no layers with experts to choose from")
        return
    figures = ("lightest rank", "heaviest rank", "hottest expert", "idle experts")
    table = make_table("layer", "balancedness", *figures, right=True)
    for layer in load["layers"]:
        table.add_row(*_row(layer))
    console.print(table)


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    tokens, ranks = layer["tokens"], layer["rank_tokens"]
    total, idle = sum(tokens), str(tokens.count(0))
    begin = (str(layer["layer"]), f"{layer['balancedness']:.3f}")
    if not total:
        return (*begin, "-", "-", "-", idle)
    lightest, heaviest = ranks.index(min(ranks)), ranks.index(max(ranks))
    hottest = tokens.index(max(tokens))
    copies = layer["physical_to_logical"].count(hottest)
    times = f" x{copies}" if copies > 1 else ""
    return (
        *begin,
        f"{lightest}: {ranks[lightest] / total:.1%}",
        f"{heaviest}: {ranks[heaviest] / total:.1%}",
        f"{hottest}{times}: {tokens[hottest] / total:.1%}",
        idle,
    )


def _title(load: dict[str, Any]) -> str:
    return (
        f"{load['group']}: {load['num_logical']} experts in {load['num_ranks']} x "
        f"{load['slots_per_rank']} slots, placement {load['placement_version']}, "
        f"{load['num_tokens']} tokens in {load['window_seconds']:.0f} s, balancedness "
        f"{load['balancedness']:.3f}"
    )


def _write(file: Path, write: Callable[[Path], object]) -> None:
    try:
        write(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
