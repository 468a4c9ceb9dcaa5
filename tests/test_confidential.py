"""What sounds secret is hidden wherever it stands, and nothing else is."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from trainer.confidential import HIDDEN, hide, is_secret, scrub, text, values
from trainer.help import show_help
from trainer.keys import sections

SECRET = ["password", "db_password", "passwd", "hf_token", "token", "api_key", "apiKey", "access_key", "aws_secret_access_key", "client_secret", "credentials", "private_key_file", "authorization"]  # fmt: skip
OPEN = ["tokenizer", "max_tokens", "monkey", "key_dim", "num_key_heads", "author", "secretary", "hash_size", "passes"]


@pytest.mark.parametrize("key", SECRET)
def test_keys_that_sound_secret(key: str) -> None:
    assert hide({"a": [{key: "value"}], "b": 1}) == {"a": [{key: HIDDEN}], "b": 1}


@pytest.mark.parametrize("key", OPEN)
def test_keys_that_do_not(key: str) -> None:
    assert hide({key: "value"}) == {key: "value"}


def test_numbers_are_hidden_where_the_key_can_mean_nothing_else() -> None:
    assert is_secret("password", 12345) and is_secret("api_key", 99)
    assert not is_secret("token", 2) and not is_secret("password", None) and not is_secret("use_password", True)


def test_no_key_of_ours_is_hidden() -> None:
    declared = [key.path.rpartition(".")[2] for section in sections() for key in section.keys]
    assert not [name for name in declared if is_secret(name, "value")]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("postgresql://me:pa:ss@host:1/db", f"postgresql://{HIDDEN}@host:1/db"),
        ("look at https://ghp_1@host/x, or not", f"look at https://{HIDDEN}@host/x, or not"),
        ("+x.api_key=abc optimizer.lr=0.1", f"+x.api_key={HIDDEN} optimizer.lr=0.1"),
        ("'+x.token=a b' seed=1", f"'+x.token={HIDDEN}' seed=1"),
        ("data.password='a b' seed=1", f"data.password={HIDDEN} seed=1"),
        ("https://host/p?token=abc&x=1", f"https://host/p?token={HIDDEN}&x=1"),
        ("~x.password=null", "~x.password=null"),
        ("sqlite:////tmp/a@b.db name=a@b", "sqlite:////tmp/a@b.db name=a@b"),
    ],
)
def test_texts(line: str, shown: str) -> None:
    assert text(line) == shown


def test_known_values_are_hidden_wherever_they_stand() -> None:
    config = {"x": {"token": "t0ken with 'quotes'"}, "uri": ["https://me:pw-123@host/"], "password": "ab"}
    known = values(config)
    login = base64.b64encode(b"me:pw-123").decode()
    assert known == {"t0ken with 'quotes'", "pw-123", login}, "two letters would be found everywhere"
    said = text("cannot log in with t0ken with 'quotes' or pw-123: about", known)
    assert said == f"cannot log in with {HIDDEN} or {HIDDEN}: about"


def test_files_of_others_are_scrubbed(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_bytes(b"\xff token is s3cret\n")
    (tmp_path / "other").write_text("s3cret")
    scrub(tmp_path, ["workerlog.*"], {"s3cret", ""})
    assert (tmp_path / "workerlog.0").read_bytes() == b"\xff token is (hidden)\n"
    assert (tmp_path / "other").read_text() == "s3cret"


def test_help_and_docs_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Sentences that speak of keys, tokens and passwords hold none. (Not so the examples of what is hidden, in docs/runs.md.)"""
    show_help([])
    root = Path(__file__).parents[1]
    pages = [
        root / "README.md",
        *(p for p in (root / "docs").glob("*.md") if p.name != "runs.md"),
        *(root / "conf").rglob("*.yaml"),
    ]
    for page in [capsys.readouterr().out, *(re.sub(r"user:password@|_SECRET=\w+", "", p.read_text()) for p in pages)]:
        assert [
            pair for pair in zip(page.splitlines(), text(page).splitlines(), strict=True) if len(set(pair)) > 1
        ] == []


HARD = [
    "Authorization: " + "]" * 9999, "a@" * 9999, "+" * 19999, "x-" * 9999, "{" * 19999, "auth: {" * 2999, "token=[" * 2999, "cookie: " * 2999,
    "{" + ", ".join(f"k{i}: v{i}" for i in range(2999)) + "}", "http://" + "a:b@" * 4999, "bearer " * 2999, "password=" + "ab," * 4999,
]  # fmt: skip


@pytest.mark.parametrize("line", HARD, ids=lambda line: line[:12])
@pytest.mark.timeout(60)
def test_a_hostile_line_takes_no_longer_than_a_long_one(line: str) -> None:
    """Twice 20,000 characters, each of which once took minutes: patterns are tried from few places, each part once."""
    text(line + line, {"some-s3cret 'value'"})
