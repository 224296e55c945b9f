"""Full-text search over a local corpus."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import ConfigError
from wingbeat.resources import ResourceFailed
from wingbeat.tools import Corpus, Document, Fault, Toolbox, corpus_read, corpus_search, read_documents
from wingbeat.tools.corpus import match_expression

DOCUMENTS = [
    Document("paris", "Paris is the capital of France. It lies on the Seine.", title="Paris"),
    Document("lyon", "Lyon is a city in France, known for its food.", title="Lyon"),
    Document("rome", "Rome is the capital of Italy.", title="Rome"),
    Document("cafe", "Ein Café in Zürich."),
    *(Document(f"filler-{number}", f"Nothing of note happened in year {number}.") for number in range(40)),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.build(tmp_path_factory.mktemp("corpus") / "a.sqlite", DOCUMENTS)


def found(corpus: Corpus, query: str) -> list[str]:
    return [hit.id for hit in corpus.search(query)]


def test_the_best_document_comes_first(corpus: Corpus) -> None:
    assert found(corpus, "capital of France")[0] == "paris"
    assert found(corpus, "Italy's capital?")[0] == "rome"
    assert found(corpus, "cities")[0] == "lyon", "words are stemmed"
    assert found(corpus, "cafe zurich") == ["cafe"], "accents do not matter"
    assert found(corpus, "elephant") == []
    hits = corpus.search("capital of France", limit=2)
    assert len(hits) == 2 and hits[0].score > hits[1].score > 0
    assert "capital of France" in hits[0].snippet and hits[0].title == "Paris"


def test_a_title_counts_for_more(tmp_path: Path) -> None:
    fillers = [Document(f"f{number}", "nothing of note", title="nothing") for number in range(20)]
    pair = [Document("text", "owl fox", title="hen"), Document("title", "fox hen", title="owl")]
    built = Corpus.build(tmp_path / "c.sqlite", [*fillers, *pair])
    assert found(built, "owl") == ["title", "text"]


def test_words_in_quotes_stand_together(corpus: Corpus) -> None:
    assert found(corpus, '"capital of Italy"') == ["rome"]
    assert found(corpus, '"Italy capital"') == []


@pytest.mark.parametrize(
    "query", ["capital NOT France", "NEAR(a b)", "title:paris", "a* OR", '"', "(", "x AND", "-y", "^z"]
)
def test_operators_of_the_index_have_no_meaning(corpus: Corpus, query: str) -> None:
    try:
        corpus.search(query)
    except ValueError as error:
        assert "expected words to look for" in str(error)


@given(st.text(max_size=40) | st.text(alphabet="\"'()*:^-+ ANDORNTEab\0{}", max_size=40))
def test_no_query_is_malformed(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    corpus = _shared(tmp_path_factory)
    try:
        expression = match_expression(text)
    except ValueError:
        return
    assert corpus.search(text, limit=1) is not None
    assert expression.startswith('"')


_built: list[Corpus] = []


def _shared(factory: pytest.TempPathFactory) -> Corpus:
    if not _built:
        _built.append(Corpus.build(factory.mktemp("corpus") / "b.sqlite", DOCUMENTS[:4]))
    return _built[0]


def test_a_query_without_end_is_looked_at_in_part(corpus: Corpus) -> None:
    """A policy that writes a million words must not hold up a search that others wait for."""
    words = " ".join(f"word{number}" for number in range(100_000))
    assert match_expression(words).count(" OR ") == 63
    assert corpus.search(words) == []


def test_a_limit_below_one_is_refused(corpus: Corpus) -> None:
    for limit in (0, -1):
        with pytest.raises(ConfigError, match="limit: expected at least 1"):
            corpus_search(corpus, limit=limit)
        with pytest.raises(ValueError, match="limit: expected at least 1"):
            corpus.search("capital", limit=limit)


async def test_the_tools_tell_what_a_model_needs(corpus: Corpus) -> None:
    toolbox = Toolbox([corpus_search(corpus, limit=1), corpus_read(corpus.path)])
    result = await toolbox.call("search", '{"query": "capital Italy"}')
    assert result.content == "[rome] Rome\nRome is the capital of Italy."
    assert result.data[0].id == "rome"
    assert (await toolbox.call("read_document", '{"id": "rome"}')).content == "Rome\n\nRome is the capital of Italy."
    assert (await toolbox.call("search", '{"query": "elephant"}')).content == "no document has any of these words"
    for name, arguments in (("search", {"query": "???"}), ("read_document", {"id": "[rome]"})):
        result = await toolbox.call(name, json.dumps(arguments))
        assert result.fault is Fault.RAISED and result.content.startswith("error: ")


def test_a_corpus_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    Corpus.build(path, [Document("a", "old")])
    with pytest.raises(ConfigError, match="two documents have the id 'b'"):
        Corpus.build(path, [Document("b", "new"), Document("b", "newer")])
    with pytest.raises(ConfigError, match="has no id"):
        Corpus.build(path, [Document("", "new")])
    assert Corpus(path).read("a").text == "old"
    assert Corpus.build(path, [Document("b", "new")]).num_documents == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.sqlite"]


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no folder" / "c.sqlite", tmp_path):
        with pytest.raises(ConfigError, match="expected a path for a corpus that can be written"):
            Corpus.build(path, DOCUMENTS)
    with pytest.raises(ConfigError, match="the document 'a' has half a surrogate pair"):
        Corpus.build(tmp_path / "c.sqlite", [Document("a", "\ud800")])
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Corpus(tmp_path / "missing")
    text = tmp_path / "text"
    text.write_text("not a database, and long enough to be told from one")
    with pytest.raises(ConfigError, match="cannot be read as one"):
        Corpus(text)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(ConfigError, match="another SQLite file"):
        Corpus(other)


async def test_a_corpus_that_breaks_is_infrastructures_fault(tmp_path: Path) -> None:
    corpus = Corpus.build(tmp_path / "d.sqlite", DOCUMENTS)
    toolbox = Toolbox([corpus_search(corpus)])
    corpus.path.write_bytes(b"\0" * 4096)
    with pytest.raises(ResourceFailed, match="cannot be read"):
        await toolbox.call("search", '{"query": "capital"}')
    corpus.path.unlink()
    with pytest.raises(ResourceFailed, match="cannot be read"):
        await toolbox.call("search", '{"query": "capital"}')


def test_documents_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"id": "a", "text": "x", "title": "T"}\n\n{"id": "b", "text": "y"}\n')
    assert list(read_documents(path)) == [Document("a", "x", "T"), Document("b", "y")]
    path.write_text('{"id": "a", "text": "x"}\n{"id": 3, "text": "y"}\n')
    with pytest.raises(ConfigError, match=r"documents\.jsonl:2: expected"):
        list(read_documents(path))
    path.write_bytes(b'{"id": "a", "text": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"documents\.jsonl, after line 0: expected UTF-8"):
        list(read_documents(path))
    with pytest.raises(ConfigError, match=r"expected documents at .*missing: No such file"):
        list(read_documents(tmp_path / "missing"))
