"""One rank process of a decode worker; started by its front, never by hand."""

from decode_worker.loop import DecodeLoop
from engine.start.rank import RankContext, run_rank


def _loop(context: RankContext) -> None:
    DecodeLoop(context).run()


if __name__ == "__main__":
    run_rank(_loop)
