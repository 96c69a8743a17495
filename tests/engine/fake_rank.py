"""A rank without a model, for tests of the front: `python fake_rank.py BEHAVIOUR`.

Answers Submit with one token and the end; what it counts are batches of messages, whatever time
passes. Behaviours: serve, die (on Submit), fail (with a
reason, before it is ready), crash (before), hang (never ready), stay (ignores Shutdown),
disagree (each rank has its own fingerprint), garbage (malformed batch on Submit).
"""

import logging
import os
import signal
import sys
import time

from core.process import die_with_parent
from core.token_ids import unpack_ids
from engine.link.link import RankLink
from engine.link.messages import (
    Abort,
    Ended,
    Failed,
    Finish,
    Produced,
    RankStats,
    Ready,
    Shutdown,
    Submit,
    TokenOut,
)
from engine.process.rank_start import RankStart


def main(behaviour: str) -> int:
    start = RankStart.from_environment()
    die_with_parent(start.front_pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = RankLink(start.endpoint, start.local_rank)
    if behaviour == "crash":
        return 7
    if behaviour == "fail":
        link.send([Failed(request_id="", code="INTERNAL", message="no such model")], RankStats())
        link.close()
        return 1
    if behaviour == "hang":
        time.sleep(60)
    ready = Ready(
        rank=start.local_rank,
        device="cpu",
        pid=os.getpid(),
        kv_fingerprint=f"f{start.local_rank}" if behaviour == "disagree" else "f",
        page_tokens=4,
        max_model_len=64,
        pages_total=100,
        max_running=8,
        eos_token_ids=(2,),
        vocab_size=256,
        start_seconds=(("python", 0.5), ("load", 1.5)),
    )
    link.send([ready], RankStats(pages_total=100, pages_free=100))
    return serve(link, behaviour)


def serve(link: RankLink, behaviour: str) -> int:
    steps, was_used = 0, False
    while True:
        link.socket.poll(1000)
        messages = link.drain()
        steps += bool(messages)
        out: list[Produced | Ended] = []
        for message in messages:
            if isinstance(message, Submit):
                was_used = True
                if behaviour == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if behaviour == "garbage":
                    link.socket.send(b"garbage")
                token = TokenOut(token_id=unpack_ids(message.output_token_ids)[-1] + 1)
                out.append(
                    Produced(request_id=message.request_id, tokens=(token,), finish=Finish.STOP)
                )
            elif isinstance(message, Abort):
                out.append(Ended(request_id=message.request_id))
            elif isinstance(message, Shutdown) and behaviour != "stay":
                link.close()
                return 0
        stats = RankStats(
            num_running=min(steps, 3),
            num_waiting=logging.getLogger().level,
            num_steps=steps,
            pages_total=100,
            pages_free=100 - steps,
            pages_owned=steps if was_used else 0,
            step_seconds=(0.004,) if messages else (),
            batch_sizes=(2,) if messages else (),
            step_tokens=(2,) if messages else (),
            kv_seconds=(0.001, 0.002) if messages else (),
            tokens_generated_total=steps,
        )
        link.send(list(out), stats)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
