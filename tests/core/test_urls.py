"""URLs: which are refused, and how they are shown without passwords."""

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.urls import parsed_url, without_password

SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        "http://[::1/",
        "http://[zz]/",
        "http://host:99999",
        "http://host:0",
        "http://host:-1",
        "http://host:x",
        "http://a\0b",
        "http://a\nb",
        "http://a b",
        "http://a\x7fb",
        "http://\ud800",
        "http://a..b/",
        f"http://{'a' * 70}/",
        "http://\u2100/",
        "http://h:\uff11",
    ],
)
@pytest.mark.parametrize("user", ["", f"me:{SECRET}@"])
def test_what_no_program_could_open_is_a_config_error_without_the_password(text: str, user: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed_url(text.replace("://", f"://{user}", 1))
    assert SECRET not in str(caught.value)
    assert "'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("http://host:8000/v1", "host", 8000),
        ("http://[::1]:8000", "::1", 8000),
        ("https://é.example", "é.example", None),
        ("http://my_host.", "my_host.", None),
        ("/a/path", None, None),
        ("", None, None),
    ],
)
def test_a_url_has_its_parts(text: str, host: str | None, port: int | None) -> None:
    parts = parsed_url(text)
    assert (parts.hostname, parts.port) == (host, port)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@host:80/x", "http://***@host:80/x"),
        ("http://me:p@ss@host/", "http://***@host/"),
        ("http://me:p/w@host/", "http://***@host/"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("redis://:hunter2@host/0", "redis://***@host/0"),
        ("ssh://git:hunter2@host", "ssh://***@host"),
        ("from http://a:b@c to http://d:e@f", "from http://***@c to http://***@f"),
    ],
)
def test_users_and_passwords_are_hidden(text: str, shown: str) -> None:
    assert without_password(text) == shown


@pytest.mark.parametrize(
    "text",
    ["ssh://git@host/x", "git+ssh://git@host/x", "http://host:8000/a@b", "http://[::1]:80/x@y", "file:///a@b", "me@host", ""],
)
def test_a_url_without_a_password_is_shown_as_it_is(text: str) -> None:
    assert without_password(text) == text


def test_long_texts_take_no_time_beyond_their_length() -> None:
    text = "://a:b" * 8_000
    assert without_password(text) == text
