//! What a trace is planned on: a card of the table, or this machine's processor.

use std::sync::Arc;

use anyhow::Context;
use firebox::dry::{Card, CardModel};
use firebox::plan::{MemoryInfo, SavedPlanner, SavedTrace, host_memory, rates_of};
use firebox::trace::{Estimate, Heap, MemoryModel};
use firebox::{Budget, Bytes, PlanReport, RecomputePolicy, Sizing, TrainError};

use crate::args::{On, Recompute, StepOptions};
use crate::wrong_use;

/// The name of this machine's processor among cards.
const CPU: &str = "cpu";

/// A device to plan on.
pub struct Target {
    /// Its name.
    pub name: String,
    /// Who places buffers there.
    pub allocator: &'static str,
    /// Plans on it.
    pub planner: SavedPlanner,
    /// The memory model, if buffers lie on firebox's pool.
    pub pooled: Option<Arc<dyn CardModel>>,
}

/// The devices that the user named, or all cards.
pub fn targets(on: &On, trace: &SavedTrace) -> anyhow::Result<Vec<Target>> {
    if on.card.is_empty() {
        return Card::all().iter().map(|card| on_card(card, on, trace)).collect();
    }
    let named = |name: &String| match name.eq_ignore_ascii_case(CPU) {
        true => on_cpu(on),
        false => on_card(&card(name)?, on, trace),
    };
    on.card.iter().map(named).collect()
}

/// The devices of a step, with the options that the user chose.
pub fn targets_of(step: &StepOptions, trace: &SavedTrace) -> anyhow::Result<Vec<Target>> {
    let mut targets = targets(&step.on, trace)?;
    if let Some(items) = step.micro_batch {
        for target in &mut targets {
            target.planner = target.planner.clone().sizing(Sizing::Fixed(items.into()));
        }
    }
    let policy = match step.recompute {
        Recompute::Never => RecomputePolicy::never(),
        Recompute::IfNeeded => RecomputePolicy::if_needed(),
    };
    for target in &mut targets {
        target.planner = target.planner.clone().recompute(policy);
    }
    if step.park {
        park(&mut targets);
    }
    Ok(targets)
}

/// Keeps the optimizer's state outside of the devices between steps.
pub fn park(targets: &mut [Target]) {
    for target in targets {
        target.planner = target.planner.clone().park_optimizer();
    }
}

/// The card with this name, in which hyphens may stand for spaces.
fn card(name: &str) -> anyhow::Result<Card> {
    let Some(card) = Card::named(&name.replace('-', " ")).or_else(|| Card::named(name)) else {
        let known: Vec<&str> = Card::all().iter().map(Card::name).collect();
        return Err(wrong_use(format!(
            "no card is called `{name}`; firebox knows: {}, and `cpu`",
            known.join(", ")
        )));
    };
    Ok(card)
}

fn on_card(card: &Card, on: &On, trace: &SavedTrace) -> anyhow::Result<Target> {
    let int = trace.about().int;
    let pooled = (!on.burn_pools).then(|| card.model(int));
    let model: Arc<dyn MemoryModel> = match &pooled {
        Some(pooled) => pooled.clone(),
        None => card.model_of_burns_pools(int),
    };
    let free = card.memory() - card.context();
    let memory = MemoryInfo::new(card.memory(), free, card.name().to_owned());
    let budget = match on.memory {
        Some(bytes) => bytes.min(card.memory()),
        None => Budget::free().resolve(&memory)?,
    };
    Ok(Target {
        name: card.name().to_owned(),
        allocator: if on.burn_pools { "burn's pools" } else { "firebox's pool" },
        planner: SavedPlanner::new(card.name(), model, budget).rates(rates_of(card)),
        pooled,
    })
}

fn on_cpu(on: &On) -> anyhow::Result<Target> {
    let budget = match on.memory {
        Some(bytes) => bytes,
        None => {
            let memory = host_memory().context("give the budget with `--memory`")?;
            Budget::free().resolve(&memory)?
        }
    };
    let planner = SavedPlanner::new("flex, Cpu", Arc::new(Heap::flex()), budget);
    let name = "CPU (Flex)".to_owned();
    Ok(Target { name, allocator: "the heap", planner, pooled: None })
}

impl Target {
    /// What training may use.
    pub fn budget(&self) -> Bytes {
        self.planner.budget()
    }

    /// The plan for a batch, or why it does not fit.
    pub fn plan(
        &self,
        trace: &SavedTrace,
        batch: usize,
    ) -> anyhow::Result<Result<PlanReport, String>> {
        match self.planner.plan(trace, batch) {
            Err(error @ TrainError::Plan { .. }) => Ok(Err(error.to_string())),
            plan => {
                let mut report = plan?;
                if is_of_burn_0_22(trace) {
                    report.estimate = Estimate::Heuristic;
                }
                Ok(Ok(report))
            }
        }
    }
}

/// Whether the edition for burn 0.22 has recorded a trace. Versions of firebox are those of burn.
pub fn is_of_burn_0_22(trace: &SavedTrace) -> bool {
    trace.about().firebox.starts_with("0.22.")
}
