"""The parts of control, made and wired to each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wingbeat.core.model_files import fingerprint
from wingbeat.core.worker_protocol import PolicySpec
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.operators import VarianceRule, build_chain
from wingbeat.dataflow.step_rule import StepRule
from wingbeat.server.director import Director, DirectorParts
from wingbeat.server.episodes.finishing import Finishing, FinishingParts
from wingbeat.server.episodes.rollout_parts import RolloutParts
from wingbeat.server.episodes.rollouts import Rollouts
from wingbeat.server.policies.host import HostContext, PolicyHost
from wingbeat.server.policies.snapshots import Snapshots
from wingbeat.server.status import blockers
from wingbeat.server.teams.teams import TeamParts, Teams
from wingbeat.server.variants.variants import VariantParts, Variants
from wingbeat.server.weights.files import WeightFiles
from wingbeat.server.weights.relay_plan import sources_for
from wingbeat.tracking.template import ChatTemplate
from wingbeat.weights.host import host_id

if TYPE_CHECKING:
    from wingbeat.server.control import Control


def make_variants(control: Control) -> Variants:
    return Variants(
        VariantParts(
            config=control.config,
            run_dir=control.run_dir,
            book=control.book,
            evaluations=control.evaluations,
            events=control.events,
            changed=control.changed,
            meter=control.metrics.agents,
            open_episodes=control.registry.open_episodes,
            clock=control.clock,
        )
    )


def make_rollouts(control: Control) -> Rollouts:
    return Rollouts(
        RolloutParts(
            config=control.config,
            policies=control.policies,
            book=control.book,
            dealer=control.dealer,
            ledger=control.ledger,
            registry=control.registry,
            evaluations=control.evaluations,
            events=control.events,
            metrics=control.metrics,
            changed=control.changed,
            watch=control.watch,
            is_complete=lambda: control.complete,
            is_stopping=lambda: control.stopping,
            blockers=lambda: blockers(control),
            clock=control.clock,
            limits=control.limits,
            variants=control.variants,
            endings=control.endings,
        )
    )


def make_finishing(control: Control) -> Finishing:
    return Finishing(
        FinishingParts(
            policies=control.policies,
            book=control.book,
            ledger=control.ledger,
            registry=control.registry,
            evaluations=control.evaluations,
            engines=control.engines,
            events=control.events,
            metrics=control.metrics,
            changed=control.changed,
            watch=control.watch,
            on_closed=control.rollouts.client_groups.close,
            on_settled=control.rollouts.issuer.settled,
            variants=control.variants,
            endings=control.endings,
        )
    )


def make_teams(control: Control) -> Teams:
    return Teams(
        TeamParts(
            policies=control.policies,
            finishing=control.finishing,
            book=control.book,
            ledger=control.ledger,
            registry=control.registry,
            events=control.events,
            metrics=control.metrics,
            watch=control.watch,
            peers=frozenset(control.config.server.peers),
            timeout_s=control.config.server.transaction_timeout_s,
            ask=control.deciders.ask,
            clock=control.clock,
        )
    )


def make_director(control: Control) -> Director:
    return Director(
        DirectorParts(
            config=control.config,
            run_dir=control.run_dir,
            policies=control.policies,
            dealer=control.dealer,
            book=control.book,
            evaluations=control.evaluations,
            events=control.events,
            changed=control.changed,
            summary=control.summary,
        )
    )


def make_weight_files(control: Control) -> WeightFiles:
    """Engines are told from now on whom to ask for them."""
    fan_out = control.config.weights.fan_out
    control.engines.weights.sources_for = lambda link, manifest: sources_for(
        link, manifest, control.engines.links, fan_out=fan_out
    )
    return WeightFiles(control.policies, run_dir=control.run_dir, host_id=host_id())


def make_snapshots(control: Control) -> Snapshots:
    return Snapshots(
        control.policies,
        run_dir=control.run_dir,
        events=control.events,
        changed=control.changed,
        path_of=control.weight_files.path_of,
    )


def make_host(control: Control, name: str, model: Path) -> PolicyHost:
    """One policy with its buffer, operators and staleness rule; ``model`` is its resolved folder."""
    config, dataflow = control.config.policies[name], control.config.dataflow
    template = Path(config.chat_template).read_text(encoding="utf-8") if config.chat_template else None
    algorithm = config.trainer.algorithm
    chain = build_chain(control.config, name, on_fault=control.operator_failed)
    return PolicyHost(
        PolicySpec(
            name=name,
            model=str(model),
            context_tokens=config.context_tokens,
            config=config.model_dump(mode="json"),
            source=config.model,
            fingerprint=fingerprint(model),
        ),
        template=ChatTemplate.load(model, template=template),
        buffer=PolicyBuffer(
            name,
            groups_per_step=dataflow.groups_per_step,
            max_staleness=dataflow.max_staleness,
            straggler=dataflow.straggler,
            compose=lambda draft, version: chain.compose(draft, version=version),
            variance=VarianceRule(config.trainer.credit, config.trainer.gamma),
            # equal rewards still carry a gradient where no baseline takes them away
            drop_zero_variance=dataflow.drop_zero_variance and not config.trainer.learns_from_equal_rewards,
            dynamic_sampling=dataflow.dynamic_sampling or algorithm == "dapo",
        ),
        rule=StepRule.of(dataflow),
        chain=chain,
        context=HostContext(
            ledger=control.ledger,
            engines=control.engines,
            events=control.events,
            overlap=control.overlap,
            changed=control.changed,
            watch=control.watch,
            seed=control.config.run.seed,
            total_steps=control.config.run.steps,
            clock=control.clock,
            encodes_deltas=control.config.weights.encoding == "auto",
            may_pass=lambda policy, version: control.barrier.may_pass(policy, version),
            starves=lambda policy, version: control.barrier.starves(policy, version),
            alarm=lambda host, name, text: control.health.sound(host, name, text),
            rebase=control.rebase,
        ),
        running_floors=lambda policy: control.book.floors(policy),
    )
