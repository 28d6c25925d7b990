"""`info`: versions, devices and backends; with --check, whether the backends are right on this machine."""

from __future__ import annotations

import argparse

import torch

from dilated_attention_lab import verification
from dilated_attention_lab.environment import device_name, report, require_device, unavailable
from dilated_attention_lab.options import flag, option


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print device, versions and backends, and why each is or is not available."
    flag(
        parser,
        "check",
        "run a call of each kind on every backend that serves the device, compare with the definition in double "
        "precision, and print the verdicts; exit code 1 if one is wrong. About a minute on a GPU, seconds on a CPU",
    )
    option(parser, "device", str, "PyTorch device for --check", shown="cuda if there is one, else cpu")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.check:
        return _verify(require_device(options.device or ("cpu" if unavailable("cuda") else "cuda")))
    if options.device is not None:
        raise ValueError(f"--device {options.device}: goes with --check; info without it prints every device")
    print(report())
    return 0


def _verify(device: torch.device) -> int:
    dtype = verification.dtype_on(device)
    serving, absent = verification.serving(device)
    print(f"{device_name(device)}, {str(dtype).removeprefix('torch.')}")
    for name, why in absent.items():
        print(f"  not {name}: {why}")
    print(f"largest error over what rounding may cause, {verification.BARS[dtype]:g}: right up to 1\n")
    calls = verification.kinds()
    width = max(len(check.name) for check in calls)
    print(" " * width + "".join(f"{name:>12}" for name in serving))
    wrong = []
    for check in calls:
        print(f"{check.name:<{width}}", end="", flush=True)
        for verdict in verification.verdicts(check, serving, device):
            print(f"{verdict!s:>12}", end="", flush=True)
            if not verdict.right:
                wrong.append(f"{verdict.backend}, {check.name}: {verdict.why}")
        print()
    print("\n" + ("\n".join(wrong) if wrong else f"{', '.join(serving)}: right"))
    return 1 if wrong else 0
