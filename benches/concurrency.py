"""How many requests in flight serve best, and whether `auto` finds it: one live server, several settings in turn.

    concurrency.py EAGLET RECIPE OUT SECONDS SETTING...      SETTING: a number or `auto`; start the server without a
                                                             prefix cache, or the first setting warms it for the others

Each setting captures into OUT/SETTING-ROUND for SECONDS; its tokens a second are those after the first two minutes for
`auto`, which must have found its place by then, and after the first for a number. Give settings more than once to see
the noise. Nothing else should run on the server's machine.
"""

import json
import pathlib
import signal
import subprocess
import sys
import time


def rate(status: pathlib.Path, skip: float) -> tuple[float, int, float]:
    """Tokens a second after `skip` seconds, failures, and the limit in use at the end."""
    lines = [json.loads(line) for line in status.read_text().splitlines()]
    first = lines[0]["at"]
    window = [line for line in lines if line["at"] - first >= skip]
    # The last line is written as the run ends, when answers have been aborted.
    begin, end = window[0], window[-2]
    tokens = end["tokens"] - begin["tokens"]
    return tokens / (end["at"] - begin["at"]), end["failed"], sum(s["limit"] for s in end["servers"])


def main() -> None:
    eaglet, recipe, out, seconds, *settings = sys.argv[1:]
    for i, setting in enumerate(settings):
        folder = pathlib.Path(out).resolve() / f"{setting}-{i}"
        concurrency = '"auto"' if setting == "auto" else setting
        command = [eaglet, "capture", "--recipe", recipe, "--grace", "0"]
        command += ["--set", f'capture.out="{folder}"', "--set", f"capture.concurrency={concurrency}"]
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(float(seconds) + (60 if setting == "auto" else 0))
        if run.poll() is not None:
            sys.exit(f"{setting}: the run was over in less than {seconds} s; give it more prompts")
        run.send_signal(signal.SIGINT)
        run.wait()
        got, failed, limit = rate(folder / "status.jsonl", 120 if setting == "auto" else 60)
        print(f"{setting:>5}  {got:8.1f} tokens/s   {failed} failed   limit {limit:.0f} at the end", flush=True)
        # What was aborted leaves the server.
        time.sleep(5)


if __name__ == "__main__":
    main()
