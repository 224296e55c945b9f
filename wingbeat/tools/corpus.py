"""Search over a local corpus: SQLite's full-text index (FTS5), ranked by BM25.

A corpus is one file, built once and only read afterwards, so any number of processes and threads search it at the same
time. BM25 is Robertson and Zaragoza, "The Probabilistic Relevance Framework" (2009), with SQLite's k1 = 1.2, b = 0.75.

    Corpus.build("wiki.sqlite", [Document("paris", "Paris is the capital of France.", title="Paris")])
    toolbox = Toolbox([corpus_search("wiki.sqlite"), corpus_read("wiki.sqlite")])
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.resources import ResourceFailed
from wingbeat.tools.results import ToolError, ToolResult
from wingbeat.tools.tool import Tool, tool

FORMAT = 1
MAX_QUERY_TERMS = 64
"""Further words of a query are not looked at: they would cost time and change little."""
SNIPPET_WORDS = 40
"""SQLite allows 64."""

_SCHEMA = f"""
CREATE TABLE documents (rowid INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(
    title, text, content='documents', content_rowid='rowid', tokenize="porter unicode61 remove_diacritics 2"
);
PRAGMA application_id = 0x57424350;
PRAGMA user_version = {FORMAT};
"""
_APPLICATION_ID = 0x57424350
_SEARCH = f"""
SELECT documents.id, documents.title, snippet(words, 1, '', '', ' ... ', {SNIPPET_WORDS}), bm25(words, 2.0, 1.0)
FROM words JOIN documents ON documents.rowid = words.rowid
WHERE words MATCH ? ORDER BY 4, documents.rowid LIMIT ?
"""
_TERM = re.compile(r'"([^"]*)"|(\w+)')
"""A phrase in quotes, or a word."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus."""

    id: str
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found."""

    id: str
    title: str
    snippet: str
    """Words around what was looked for."""
    score: float
    """Higher is better; only scores of one query compare."""


class Corpus:
    """A corpus that was built.  Raises ConfigError if the file is none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not self.path.is_file():
            raise ConfigError(f"expected a corpus at {self.path}, got no such file; make it with Corpus.build(...)")
        wrong = f"expected a corpus of format {FORMAT} at {self.path}, got"
        try:
            with self._connection() as connection:
                kind = connection.execute("PRAGMA application_id").fetchone()[0]
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if (kind, version) != (_APPLICATION_ID, FORMAT):
                    raise ConfigError(f"{wrong} another SQLite file; build it anew")
                self.num_documents: int = connection.execute("SELECT count(*) FROM documents").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{wrong} a file that cannot be read as one: {error}") from error

    @classmethod
    def build(cls, path: str | os.PathLike[str], documents: Iterable[Document]) -> Corpus:
        """Write a corpus; a file that is there is replaced once the new one is complete, so that several processes may
        build the same one.

        Raises ConfigError for two documents of one id and a path that cannot be written, DependencyMissing where SQLite
        has no FTS5.
        """
        target = Path(path).absolute()
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.draft")
        try:
            with contextlib.closing(sqlite3.connect(draft)) as connection:
                _fill(connection, documents)
            os.replace(draft, target)
        except (sqlite3.OperationalError, IsADirectoryError) as error:
            raise ConfigError(f"expected a path for a corpus that can be written, got {target}: {error}") from error
        finally:
            draft.unlink(missing_ok=True)
        return cls(target)

    def search(self, query: str, *, limit: int = 5) -> list[Hit]:
        """The best ``limit`` documents that hold any of the query's words or quoted phrases.

        Everything else in a query is punctuation: FTS5's operators have no meaning, so no query is malformed.
        Raises ValueError for a query without a word or a limit below 1, ResourceFailed if the file is damaged or gone.
        """
        if limit < 1:
            raise ValueError(f"limit: expected at least 1, got {limit}")
        expression = match_expression(query)
        with self._reading() as connection:
            rows = connection.execute(_SEARCH, (expression, limit)).fetchall()
        return [Hit(id=row[0], title=row[1], snippet=row[2], score=-row[3]) for row in rows]

    def read(self, document_id: str) -> Document:
        """One document whole.  Raises KeyError if there is none of that id, ResourceFailed as :meth:`search`."""
        with self._reading() as connection:
            row = connection.execute("SELECT id, title, text FROM documents WHERE id = ?", (document_id,)).fetchone()
        if row is None:
            raise KeyError(document_id)
        return Document(id=row[0], title=row[1], text=row[2])

    def _connection(self) -> contextlib.closing[sqlite3.Connection]:
        """One for each use: cheap beside a search, and of no thread or process."""
        return contextlib.closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro&immutable=1", uri=True))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection() as connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise ResourceFailed(f"the corpus {self.path} cannot be read: {error}") from error


def match_expression(query: str) -> str:
    """A query in FTS5's language: its words and phrases, each quoted, any of which may match.

    Raises ValueError where there is no word in it.
    """
    terms = [" ".join(re.findall(r"\w+", phrase)) if phrase else word for phrase, word in _TERM.findall(query)]
    quoted = list(dict.fromkeys(f'"{term}"' for term in terms if term.strip("_ ")))[:MAX_QUERY_TERMS]
    if not quoted:
        raise ValueError(f"expected words to look for, got {query!r}")
    return " OR ".join(quoted)


def read_documents(path: str | os.PathLike[str]) -> Iterator[Document]:
    """From JSON lines with ``id``, ``text`` and, where there is one, ``title``.  Raises ConfigError with the line."""
    number = 0
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _document(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"expected documents at {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, after line {number}: expected UTF-8, got {error}") from error


def corpus_search(corpus: Corpus | str | os.PathLike[str], *, limit: int = 5, name: str = "search") -> Tool:
    """``search(query)``: what a model reads is id, title and snippet of the best ``limit`` documents.

    Raises ConfigError for a file that is no corpus, and a limit below 1.
    """
    if limit < 1:
        raise ConfigError(f"limit: expected at least 1, got {limit}")
    opened = corpus if isinstance(corpus, Corpus) else Corpus(corpus)

    @tool(name=name)
    def search(query: Annotated[str, Field(min_length=1)]) -> ToolResult:
        """Search a collection of documents. The best come first, each with its id, title and a passage.

        Args:
            query: words to look for; "words in quotes" must stand together
        """
        try:
            hits = opened.search(query, limit=limit)
        except ValueError as error:
            raise ToolError(f"query: {error}") from None
        lines = [f"[{hit.id}] {hit.title}\n{hit.snippet}" if hit.title else f"[{hit.id}] {hit.snippet}" for hit in hits]
        return ToolResult("\n\n".join(lines) or "no document has any of these words", data=hits)

    return search


def corpus_read(corpus: Corpus | str | os.PathLike[str], *, name: str = "read_document") -> Tool:
    """``read_document(id)``: a document whole."""
    opened = corpus if isinstance(corpus, Corpus) else Corpus(corpus)

    @tool(name=name)
    def read_document(id: str) -> ToolResult:
        """Read a document of the collection.

        Args:
            id: as search shows it, without the brackets
        """
        try:
            document = opened.read(id)
        except KeyError:
            raise ToolError(f"id: expected that of a document, got {id!r}; search shows them") from None
        return ToolResult(f"{document.title}\n\n{document.text}" if document.title else document.text, data=document)

    return read_document


def _fill(connection: sqlite3.Connection, documents: Iterable[Document]) -> None:
    try:
        connection.executescript(_SCHEMA)
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        raise DependencyMissing(
            "Python's SQLite has no FTS5 here: use a Python whose SQLite was built with it"
        ) from error
    with connection:
        for document in documents:
            if not document.id:
                raise ConfigError(f"a document has no id; its text begins {document.text[:40]!r}")
            try:
                connection.execute(
                    "INSERT INTO documents (id, title, text) VALUES (?, ?, ?)",
                    (document.id, document.title, document.text),
                )
            except sqlite3.IntegrityError as error:
                raise ConfigError(f"two documents have the id {document.id!r}") from error
            except UnicodeEncodeError as error:
                raise ConfigError(f"the document {document.id!r} has half a surrogate pair: {error}") from error
        connection.execute("INSERT INTO words (words) VALUES ('rebuild')")
        connection.execute("INSERT INTO words (words) VALUES ('optimize')")


def _document(line: str, where: str) -> Document:
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a JSON object, got what is no JSON: {error}") from error
    wrong = not isinstance(data, dict) or not all(isinstance(data.get(name), str) for name in ("id", "text"))
    if wrong or not isinstance(data.get("title", ""), str):
        raise ConfigError(f'{where}: expected {{"id": text, "text": text, "title": text}}, got {line.strip()[:80]}')
    return Document(id=data["id"], text=data["text"], title=data.get("title", ""))
