"""A stand-in for `sglang generate`: prints the lines and writes the dumps of the real one, as read in both releases.

No number here was measured on anything. `FAKE` in the environment says what goes wrong.
"""

import stat
import sys
from pathlib import Path

LOADED = (
    "Loaded transformer: QwenImageTransformer2DModel (sgl-diffusion version). model size: 38.05 GB, "
    "consumed GPU mem: 38.05 GB, avail GPU mem: 99.00 GB"
)
PROGRAM = f"""#!{sys.executable}
import argparse, json, os, sys, time
from pathlib import Path

fake = os.environ.get("FAKE", "")
parser = argparse.ArgumentParser()
parser.add_argument("command")
for name in ("model-path", "backend", "perf-dump-path", "output-path", "prompt", "prompt-path", "num-inference-steps"):
    parser.add_argument("--" + name)
args, rest = parser.parse_known_args()
assert args.command == "generate" and args.backend == "sglang" and "--save-output" in rest
Path(os.environ["FAKE_CALLS"]).open("a").write(json.dumps({{
    "argv": sys.argv[1:],
    "env": {{k: v for k, v in os.environ.items() if k.startswith(("HF_", "SGLANG_", "CUDA_VIS", "FLASHINFER_D"))}},
}}) + "\\n")

def log(text, level="INFO"):
    print("[11-22 21:00:00] " + (chr(27) + "[36m") + text + (chr(27) + "[0m"), flush=True)

log("Loading pipeline modules from config: ...")
if fake.startswith("say:"):
    log(fake[4:])
    time.sleep(60)  # a hard stop does not wait for the end
if fake == "token":
    log("request with " + os.environ.get("HF_TOKEN", "none"))
if fake != "unloaded":
    log({LOADED!r})
if fake == "exit":
    sys.exit(9)
if fake != "pictureless":
    Path(args.output_path, "20261122-ab.png").write_bytes(b"picture")
calls = len(Path(os.environ["FAKE_CALLS"]).read_text().splitlines())
scale = float(os.environ.get("FAKE_SCALE", "1")) * (1 + 0.01 * calls)
stages = {{"InputValidationStage": 0.1, "QwenImageLayeredBeforeDenoisingStage": 7.0, "DenoisingStage": 900.0,
          "LTX2RefinementStage": 100.0, "DecodingStage": 50.0}}
if fake == "stageless":
    stages = {{"InputValidationStage": 0.1, "QwenImageLayeredBeforeDenoisingStage": 7.0}}
if fake == "other stages":
    stages["UpscalingStage"] = 1.0
dump = {{
    "timestamp": "2026-11-22T21:00:00+00:00", "request_id": "id",
    "commit_hash": "0" * 40 if fake == "commit" else os.environ["SGLANG_GIT_COMMIT"], "tag": "cli_generate",
    "total_duration_ms": 1100.0 * scale,
    "steps": [{{"name": k, "duration_ms": v * scale}} for k, v in stages.items()],
    "denoise_steps_ms": [{{"step": i, "duration_ms": 18.0 * scale}} for i in range(50)],
    "memory_checkpoints": {{"after_DenoisingStage": {{"allocated_mb": 1.0, "reserved_mb": 1.0,
                            "peak_allocated_mb": 1.0, "peak_reserved_mb": 40960.0}}}},
    "meta": {{"prompt": args.prompt, "model": args.model_path}},
}}
if fake != "dumpless":
    text = "{{" if fake == "broken dump" else json.dumps(dump, indent=2)
    Path(args.perf_dump_path).write_text(text)
    log("Metrics dumped to: " + args.perf_dump_path)
"""


def install(folder: Path, version: str = "0.5.12.post1") -> Path:
    """Put the program and the metadata of a release into `folder`; gives the folder of the program."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("raise SystemExit('was imported')\n")
    metadata = folder / f"sglang-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    program = folder / "bin" / "sglang"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program.parent
