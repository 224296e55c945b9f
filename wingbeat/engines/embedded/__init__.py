"""The embedded engine: continuous batching over unmodified Hugging Face causal language models.

    submit ─▶ waiting ─▶ scheduler ─▶ step plan ─▶ one model forward ─▶ sampler ─▶ TokenEvents
                 ▲           │             │              │                │
                 └─ preempt ─┘          rows (who owns which KV)        grammars (what may come next)
                                        and pool (where it lies)        and supports (what could have)

The model's own code runs untouched.  It calls back into :mod:`.attention` (registered with
transformers' attention interface) and into our cache object, which write to and attend over one flat
KV pool.  Invariants: one forward sees one version; a row of KV has one writer; a row is shared by
copying, never by aliasing.
"""

from wingbeat.engines.embedded.adapters import AdapterWeights
from wingbeat.engines.embedded.engine import EmbeddedEngine
from wingbeat.engines.embedded.grammar import GrammarCompiler
from wingbeat.engines.embedded.lora import AdapterMerger
from wingbeat.engines.embedded.options import EngineOptions
from wingbeat.engines.embedded.runs import Run, plan_runs

__all__ = ["AdapterMerger", "AdapterWeights", "EmbeddedEngine", "EngineOptions", "GrammarCompiler", "Run", "plan_runs"]
