"""One prefill rank: `python -m prefill_worker.rank`, started by the worker's front."""

from engine.start.rank import RankContext, run_rank
from prefill_worker.loop import PrefillLoop


def main(context: RankContext) -> None:
    PrefillLoop(context).run()


if __name__ == "__main__":
    run_rank(main)
