"""Invented credentials of many shapes, and where users put them. Each has a mark by which it is found wherever it is written."""

import random
import string
from pathlib import Path

_DRAW = random.Random(41)


def _random(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_DRAW.choice(alphabet) for _ in range(count))


_UPPER = string.ascii_uppercase + string.digits
TOKENS = (
    f"hf_{_random(34)}",
    f"sk-{_random(48)}",
    f"sk-proj-{_random(40)}",
    f"sk-ant-api03-{_random(60)}",
    f"sk_live_{_random(24)}",
    f"ghp_{_random(36)}",
    f"gho_{_random(36)}",
    f"github_pat_{_random(22)}_{_random(59)}",
    f"glpat-{_random(20)}",
    f"xoxb-{_random(12, string.digits)}-{_random(24)}",
    f"xapp-1-{_random(30)}",
    f"AKIA{_random(16, _UPPER)}",
    f"ASIA{_random(16, _UPPER)}",
    f"AIza{_random(35)}",
    f"ya29.{_random(40)}",
    f"eyJ{_random(20)}.eyJ{_random(30)}.{_random(43)}",
    f"SG.{_random(22)}.{_random(43)}",
    f"npm_{_random(36)}",
    f"pypi-{_random(60)}",
    f"nvapi-{_random(60)}",
    f"gsk_{_random(52)}",
    f"r8_{_random(37)}",
    f"dop_v1_{_random(64, '0123456789abcdef')}",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYz1mpLeKeYq",
    f"{_random(43)}=",
    _random(32),
    _random(64),
)
"""Recognized without a name."""
PASSWORDS = tuple(f"planted{number}-Pa55" for number in range(40))
"""Recognized by their names alone."""
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{_random(64)}\n{_random(64)}\n-----END RSA PRIVATE KEY-----"
MARKS = (*TOKENS, *PASSWORDS, *PEM.splitlines()[1:3])


def planted_argv() -> list[str]:
    """Words of a command with every token and with passwords in the ways in which options take them."""
    take = iter(PASSWORDS)
    named = [
        *("--api-key", next(take), "--token", next(take), "--password", next(take), "--hf-token", next(take), "-p", next(take)),
        *(f"--api-key={next(take)}", f"--auth-token={next(take)}", f"--db.password={next(take)}", f"-p{next(take)}"),
        *("--header", f"Authorization: Bearer {next(take)}", "-H", f"X-Api-Key: {next(take)}", "-H", f"Cookie: id={next(take)}"),
        *("-u", f"me:{next(take)}", f"HF_TOKEN={next(take)}", f"PGPASSWORD={next(take)}", f"+client.secret={next(take)}"),
        f"http://me:{next(take)}@127.0.0.1:8000/v1",
        f"postgresql://me:{next(take)}@host:5432/db?sslmode=off",
        f"https://{next(take)}@host/x",
        f"https://host/x?api_key={next(take)}&model=a",
        f"https://host/x?a=1&X-Amz-Signature={next(take)}",
        f"https://host/x?sv=1&sig={next(take)}",
        f"https://host/x?token={next(take)}#top",
        f'{{"apiKey": "{next(take)}", "model": "a"}}',
        f"echo x --password {next(take)} && curl -H 'Authorization: Basic {next(take)}'",
        f"HF_TOKEN={next(take)} python serve.py --client-secret='{next(take)}'",
        f"--extra=--token={next(take)}",
        PEM,
    ]
    return [*named, *TOKENS]


def planted_environment() -> dict[str, str]:
    """Variables of names that are recorded, with credentials by their names or by their values."""
    take = iter(PASSWORDS[27:])
    names = ("PWD", "DSN", "COOKIE", "SESSION", "BEARER", "SIGNATURE", "PIN", "KEY", "APITOKEN", "PASSPHRASE")
    by_name = {f"NCCL_{name}": next(take) for name in names}
    by_value = {f"CUDA_FACT_{number}": value for number, value in enumerate(TOKENS)}
    by_value["TORCH_STORE"] = f"redis://me:{next(take)}@host:6379/0"
    by_value["OMP_EXTRA"] = f"--token={next(take)} --verbose"
    return {**by_name, **by_value, "SLURM_NOTE": PEM}


def leaks(texts: dict[str, str]) -> list[tuple[str, str]]:
    """The marks that occur in texts, with the name of the text."""
    return [(name, mark) for name, text in texts.items() for mark in MARKS if mark in text]


def texts_of(folder: Path) -> dict[str, str]:
    """The content of all files in a folder, and their names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): f"{path}\n{path.read_bytes().decode(errors='replace')}" for path in files}
