"""What sounds secret is hidden wherever it stands, and nothing else is."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import subprocess
import time
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest

from trainer.cli.help import show_help
from trainer.config.keys import sections
from trainer.config.redact import command, hide, of_command_line, of_environment, scrub, text, values
from trainer.config.secret_parts import HIDDEN, is_secret
from trainer.wording import quoted

SECRET = """
    password db_password passwd hf_token token api_key apiKey access_key aws_secret_access_key client_secret
    credentials private_key_file authorization oauth authtoken dbpass mypassword clientsecret privkey auth_header
    oauth2Token smtp_pass DB_PASS AUTH-HEADER userCreds sshkey proxy_auth tokenizer_auth_token authors_password
    aws_access_key_id privkey_pem cookies bearer otp session_id
""".split()
OPEN = """
    tokenizer max_tokens monkey key_dim num_key_heads author secretary hash_size passes tokenizer_name pad_token
    max_new_tokens image_key keypoints key_padding_mask compass bypass authors low_pass_filter compat signal
    config keys pattern option credit token_type_embeddings passthrough pathway token_mixer token_pooling
    special_tokens prompt_tokens detokenize pass_through num_passengers sacred
""".split()


@pytest.mark.parametrize("key", SECRET)
def test_keys_that_sound_secret(key: str) -> None:
    assert hide({"a": [{key: "value"}], "b": 1}) == {"a": [{key: HIDDEN}], "b": 1}


@pytest.mark.parametrize("key", OPEN)
def test_keys_that_do_not(key: str) -> None:
    assert hide({key: "value"}) == {key: "value"}


OF_VARIABLES = """
    REG_TOKEN REGISTER_TOKEN NEW_TOKEN TEXT_TOKEN BAD_TOKEN EXTRA_TOKEN N_TOKEN SHARE_KEY COSMOS_PRIMARY_KEY
    DATA_KEY BATCH_KEY TOKEN_FILE IMAGE_KEY
""".split()
OF_MODELS = """
    token_mode token_merge token_map vocab_tokens keep_tokens pass_threshold pass_at_k pass@k auth_mode text_key
    mask_key token_shift tokenMode forward_pass caption_key reg_token primary_key token_file
""".split()
BY_CHANCE = "donkey turkey hockey surpass passion_flower passport credibility authentic underpass accredited".split()
RANDOM = "xK9Quartz77xB2"


@pytest.mark.parametrize("key", OF_VARIABLES)
def test_names_in_capitals_mean_what_they_say(key: str) -> None:
    assert of_environment({key: RANDOM}) == {RANDOM} and hide({key: "value"}) == {key: HIDDEN}
    assert text(f"export {key}={RANDOM}") == f"export {key}={HIDDEN}"


@pytest.mark.parametrize("key", OF_MODELS)
@pytest.mark.parametrize(
    "value",
    [
        "concat",
        "img_0001",
        "<|begin_of_text|>",
        "/data/vocab.txt",
        0.5,
        123456,
        ["cls", "reg1"],
        {"a": 1, "_target_": "m.Vit2d3x4y5z6q"},
    ],
)
def test_keys_of_models_are_shown(key: str, value: object) -> None:
    assert hide({key: value}) == {key: value} and values({key: value}) == set()
    assert text(f"+model.{key}={value}") == f"+model.{key}={value}"


@pytest.mark.parametrize("key", [key for key in OF_MODELS if "@" not in key])
def test_but_for_a_random_value(key: str) -> None:
    assert (
        HIDDEN in str(hide({key: RANDOM}))
        and HIDDEN in str(hide({key: [RANDOM]}))
        and values({key: RANDOM}) == {RANDOM}
    )
    for line in (f"+model.{key}={RANDOM}", f"x {key}='{RANDOM}' y", f"{key}: {RANDOM}", f'{{"{key}": "{RANDOM}"}}'):
        assert RANDOM not in text(line), line


@pytest.mark.parametrize("key", BY_CHANCE)
def test_words_that_contain_one_of_ours_by_chance_are_shown(key: str) -> None:
    assert hide({key: RANDOM, "classes": {key: ["a"]}}) == {key: RANDOM, "classes": {key: ["a"]}}
    assert text(f"{key}: many") == f"{key}: many"


@pytest.mark.parametrize(
    "key", "token_secret pass_word auth_value token_auth token_key mask_token_password token_1 pass_through_key".split()
)
def test_a_word_before_a_secrets_is_no_excuse(key: str) -> None:
    assert hide({key: "value"}) == {key: HIDDEN}


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


def test_the_place_of_a_file_in_the_environment_is_no_secret(tmp_path: Path) -> None:
    """As SSH_AUTH_SOCK and XAUTHORITY are: parts of their paths would be hidden in every other path."""
    (place := tmp_path / "agent-99x17").touch()
    variables = {"SSH_AUTH_SOCK": str(place), "XAUTHORITY": str(place), "MY_AUTH": "/Zx81QqPp/nowhere", "PWD": "/x/y"}
    assert of_environment(variables) == {"/Zx81QqPp/nowhere"}


def test_files_of_others_are_scrubbed(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_bytes(b"\xff token is s3cret\n")
    (tmp_path / "other").write_text("s3cret")
    scrub(tmp_path, ["workerlog.*"], {"s3cret", ""})
    assert (tmp_path / "workerlog.0").read_bytes() == b"\xff token is ******\n"
    assert (tmp_path / "other").read_text() == "s3cret"


def test_files_of_others_keep_what_is_written_while_they_are_scrubbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "workerlog.1"
    log.write_text("\u00e4 token=s\u00e9cret-1\ns\u00e9cret-1 again\n")
    pwrite = os.pwrite

    def while_others_write(file: int, stars: bytes, place: int) -> int:
        with log.open("a") as other:
            other.write("the last words\n")
        return pwrite(file, stars, place)

    monkeypatch.setattr(os, "pwrite", while_others_write)
    scrub(tmp_path, ["workerlog.*"], {"s\u00e9cret-1"})
    assert log.read_text() == "\u00e4 token=*********\n********* again\nthe last words\nthe last words\n"
    log.write_text("s\u00e9cret-1\n")
    monkeypatch.setattr(os, "pwrite", lambda *_: no_room())
    with pytest.raises(OSError, match="No space"):
        scrub(tmp_path, ["workerlog.*"], {"s\u00e9cret-1"})
    assert log.read_text() == "s\u00e9cret-1\n"


def no_room() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_help_and_docs_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Sentences that speak of keys, tokens and passwords hold none. (Not so the examples of what is hidden, in
    docs/runs.md.)"""
    show_help([])
    root = Path(__file__).parents[2]
    pages = [
        root / "README.md",
        *(p for p in (root / "docs").glob("*.md") if p.name != "runs.md"),
        *(root / "conf").rglob("*.yaml"),
    ]
    no_secrets = r"user:password@|_SECRET=\w+|--key NAME|Authorization: Bearer \$TOKEN"
    for page in [capsys.readouterr().out, *(re.sub(no_secrets, "", p.read_text()) for p in pages)]:
        assert [
            pair for pair in zip(page.splitlines(), text(page).splitlines(), strict=True) if len(set(pair)) > 1
        ] == []


TOKENS = [
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3_" * 10,
    "hf_" + "aB3" * 11,
    "sk-" + "aB3" * 16,
    "sk-proj-" + "aB3-" * 10,
    "glpat-" + "aB3" * 7,
    "xoxb-123456789012-aB3aB3",
    "AKIA" + "AB3D" * 4,
    "sk_live_" + "aB3" * 8,
    "gsk_" + "aB3" * 16,
    "glrt-" + "aB3" * 7,
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_known_by_its_shape_wherever_it_stands(token: str) -> None:
    for line in ("{}", "cloning with {} now", "x={}", "+model.name={}", "https://host/{}/x", '{{"a": "{}"}}'):
        assert token not in text(line.format(token)) and token in values(line.format(token)), line
    assert hide({"note": [f"log in with {token}"]}) == {"note": [f"log in with {HIDDEN}"]}


@pytest.mark.parametrize(
    "address",
    [
        "https://hooks.slack.com/services/T0AB/B0CD/zK9Quartz77x",
        "https://discord.com/api/webhooks/123456789/zK9Quartz77x-and_more_of_it",
    ],
)
def test_an_address_that_anybody_may_write_to_is_hidden(address: str) -> None:
    assert "Quartz" not in text(f"+callbacks.0.url={address}") and "Quartz" not in str(hide({"url": address}))


@pytest.mark.parametrize(
    "line",
    [
        "sk-learn",
        "hf_hub",
        "ghp_ is a prefix",
        "task-1-of-2",
        "desk-lamp-with-many-parts",
        "sk-learn-pipeline-of-steps",
        "eyJ",
    ],
)
def test_a_word_that_begins_like_a_token_is_none(line: str) -> None:
    assert text(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "run --password=X7y now",
        "run --password X7y now",
        "run -password 'X7y z' now",
        "curl --oauth-secret X7y",
        "--db-pass=X7y",
        "--db-pass X7y",
        "x --smtp_pass X7y",
        "--auth-token=X7y",
        "--auth-token X7y",
        "x.py --api_key X7y --n 3",
    ],
)
def test_flags_of_a_command_in_a_text_are_hidden(line: str) -> None:
    assert "X7y" not in text(line) and HIDDEN in text(line)


@pytest.mark.parametrize(
    "line",
    [
        "--password, or nothing",
        "the --token-type flag",
        "--tokenizer=bert --n 3",
        "--password --n 3",
        "the --token flag",
        "--tokens 4096",
        "--low-pass X7y",
    ],
)
def test_and_other_flags_stay(line: str) -> None:
    assert text(line) == line


@pytest.mark.parametrize("key", ["hub_token", "otp", "auth", "token", "api_token", "pass", "signature"])
def test_long_numbers_under_keys_of_secrets_are_hidden(key: str) -> None:
    number = 123456789012
    assert hide({"a": {key: number, "n": 3}}) == {"a": {key: HIDDEN, "n": 3}}
    assert values({key: number}) == {str(number)} == values(f"{key}: {number}")
    for line in (
        f"{key}={number}",
        f"a {key}={number}",
        f"{key}: {number}",
        f"{{'{key}': {number}}}",
        f'"{key}": {number}',
    ):
        assert str(number) not in text(line), line
    for short in (f"{key}=3", f"{key}: 0.25000", f"{{'{key}': 1234}}"):
        assert text("it is " + short) == "it is " + short
    assert hide({"tokens": 123456, "num_tokens": 123456}) == {"tokens": 123456, "num_tokens": 123456}
    declared = [key.path.rpartition(".")[2] for section in sections() for key in section.keys]
    assert not [name for name in declared if is_secret(name, number)], "no key of ours"


def test_known_values_are_hidden_as_keys() -> None:
    config = {"token": "zK9Quartz77x", "a": {"zK9Quartz77x": 1, "lr": 2}, "credentials": {"zK9Quartz77x": "b"}}
    assert hide(config, values(config)) == {"token": HIDDEN, "a": {HIDDEN: 1, "lr": 2}, "credentials": {HIDDEN: HIDDEN}}
    assert hide({"data": {"batch_size": 2}}, {"data", "batch_size"}) == {"data": {"batch_size": 2}}, "keys of ours"


@pytest.mark.parametrize(
    "line",
    [
        "Basic training of resnet50",
        "a bearer protein",
        "negotiate something",
        "name: basic augmentation_2x",
        "class cookie: 12 samples",
        "cookie: 12 samples",
        "Signature: (input: Tensor) -> Tensor",
        "tokens: 12,345 in 3 s",
        "pass: 2 of 3 finished",
        "basic data-augmentation_v2",
    ],
)
def test_sentences_hold_no_secret(line: str) -> None:
    assert text(line) == line and values(line) == set()


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("Bearer abc123XYZ", "abc123XYZ"),
        ("Authorization: Basic training", "training"),
        ("basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("Cookie: a=b; sid=Zx81QqPp", "Zx81QqPp"),
        ("cookie: Zx81QqPp", "Zx81QqPp"),
        ("{_target_: m.C, api_token: 'Zx81 Qq99,pp'}", "Zx81 Qq99,pp"),
        ("bearer dXNlcjp3ZXJ0eXVp", "dXNlcjp3ZXJ0eXVp"),
    ],
)
def test_and_logins_do(line: str, secret: str) -> None:
    assert secret not in text(line) and secret in values(line)


def test_what_says_nothing_is_not_learnt() -> None:
    metrics = {"secret": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 102}}
    assert values({"metrics": metrics}) == set()
    typed = "metrics={secret:{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:102}}"
    assert not {"102", "torchmetrics.classification.MulticlassF1Score"} & of_command_line([typed])
    assert HIDDEN in str(hide(metrics)), "at its key it is hidden all the same"


@pytest.mark.parametrize("secret", ["pässwörtÄ9", "tiger/\tlion%7Ä"])
def test_a_known_value_is_found_however_it_is_spelled(secret: str) -> None:
    lower = re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), quote(secret, safe=""))
    spelled = [
        ascii(secret),
        secret.encode("unicode_escape").decode(),
        str(secret.encode()),
        lower,
        *(unicodedata.normalize(f, secret) for f in ("NFC", "NFD")),
    ]
    for one in (*spelled, json.dumps(secret), repr(secret)):
        assert text(f"x {one} y", {secret}) in (
            f"x {HIDDEN} y",
            f"x '{HIDDEN}' y",
            f'x "{HIDDEN}" y',
            f"x b'{HIDDEN}' y",
        ), one


HARD = [
    *("Authorization: {]}", "a@", "+", "x-", "{", "auth: {", "token=[", "cookie: ", "{k: v, ", "http://a:b@"),
    *("x://a:b@c/ ", "bearer ", "password=ab,", "a-", "a.", "\n", " \n", "token=a ", "'token=a ", '"token": '),
    *("token: [", " ", "\t", "token=\\'", "'", "''", "${oc.env:a,", "_secret", "aB", "secret1", "b", "sk-"),
    *("ghp_", "eyJ-", "--password ", "-a-b", "~+", "token='\\'", "'a ", "token=1,", "password: x\n"),
    "password=",
]
"""Repeated, each of these looks like the beginning of a secret again and again."""
AROUND = [("", ""), ("token=", "="), ("token=a,", "="), ("'secret: ", "x"), ("{a: ", "}"), ("x://y?", "@")]
LENGTH = 15_000


@pytest.mark.parametrize(
    "word", ["launch.ips='a,b'", "a=$x'", "a='`b`'", "a b", "a='b\"'", "a='!'", "a=[{b:1}]", "a='\\n'", "a='1\n2'", ""]
)
def test_a_command_can_be_copied_into_a_shell(word: str) -> None:
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted(word)}"], capture_output=True, text=True, check=True)
    assert printed.stdout == word
    assert quoted("launch.ips='a,b'") == "\"launch.ips='a,b'\"", "as a user would type it"


def cost(line: str) -> float:
    """CPU seconds, at best."""
    best = 1e9
    for _ in range(3):
        begin = time.process_time()
        text(line, {"some-s3cret 'value'"})
        values([line])
        best = min(best, time.process_time() - begin)
        if best < 0.1:
            break
    return best


@pytest.mark.parametrize("piece", HARD, ids=repr)
def test_a_hostile_line_takes_about_as_long_as_any_other(piece: str) -> None:
    """Patterns are tried from few places, and look at each part once. What is not so takes some hundred times as
    long."""
    plain = cost("loss is 0.25, all is well with it; " * (LENGTH // 35))
    for before, after in AROUND:
        line = before + piece * (LENGTH // len(piece)) + after
        assert cost(line) < 0.05 + 50 * plain, line[:40]


@pytest.mark.parametrize("line", ["'token='", '"password="', "x 'token='", "token='", "password=", "token=["])
def test_a_quote_that_nobody_closes_breaks_nothing(line: str) -> None:
    text(line)
    values(line)


def test_a_command_line_is_what_a_user_types() -> None:
    assert command(["+recipe=x", "resume.path=auto", "name=a b"]) == "+recipe=x resume=auto 'name=a b'"
