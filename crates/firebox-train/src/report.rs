//! Reports of plans and of measured memory. The Learner prints a plan before it trains on it, and
//! returns all reports in `Fitted`.

use std::fmt;

use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use firebox_plan::Plan;
use firebox_trace::{Bytes, CategoryBytes, Estimate, ModuleBytes, Paging, PoolPages, TensorInfo};

use crate::error::Phase;
use crate::planner::overhead::OverheadBytes;
use crate::planner::recompute::{Recomputed, Recomputing};
use crate::planner::{Planned, PlanningCost, Replanned};
use crate::whole::Joining;

/// The plan for one shape of batch: how it is split and what that needs. Displays as a table.
#[derive(Clone, Debug)]
pub struct PlanReport {
    /// The backend and the device.
    pub device: String,
    /// Whether the batch is for training or validation.
    pub phase: Phase,
    /// The memory that training may use.
    pub budget: Bytes,
    /// The split of the loader's batch.
    pub plan: Plan,
    /// Where items meet, if that is why the batch is not split: the operation, the module whose
    /// parameters were used last before it, and what happens there.
    pub items_meet: Option<String>,
    /// What is recomputed instead of kept, if anything.
    pub recomputed: Option<Recomputing>,
    pub(crate) recipes: Option<Recomputed>,
    /// The predicted peak, broken down by what holds it.
    pub categories: CategoryBytes,
    /// What holds the memory in use at the peak, by module, largest first. Which module an
    /// operation belongs to follows from the flow of data, see [`Modules`](firebox_trace::Modules).
    pub modules: Vec<ModuleBytes>,
    /// What the optimizer keeps between steps: twice the parameters for Adam, once for SGD with
    /// momentum.
    pub optimizer_state: Bytes,
    /// What of the optimizer's state is [parked](crate::LearnerBuilder::park_optimizer) between
    /// steps, outside of the device.
    pub parked: Bytes,
    /// The operation at the predicted peak.
    pub operation: String,
    /// How reliable the prediction is.
    pub estimate: Estimate,
    /// What parameters that have no gradient in this batch would add with their first one: the
    /// gradient, and what the optimizer keeps for it. The prediction holds so far, without them.
    /// `None` if all have one; zero if the optimizer decides by values that it reads, and what it
    /// would add is not known.
    pub may_add: Option<Bytes>,
    /// The part of the peak not caused by the step itself.
    pub overhead: OverheadBytes,
    /// The most that is alive while a batch is made, before its step: the tensors of the batch that
    /// is being made, each at the size of its elements, and what is there between steps. May exceed
    /// the predicted peak, which is that of the step. What an operation takes while it runs is not
    /// included. Zero for a plan without a run. A batch that was not read through the Learner or
    /// [`StepPlanner::batches`](crate::StepPlanner::batches) counts only with what loader threads
    /// have asked for.
    pub making: Bytes,
    /// The pages at the peak, where the device's allocator reserves whole pages.
    pub paging: Option<Paging>,
    /// Operations that the memory model has no rule for.
    pub unaccounted: Vec<String>,
    /// The paths of running statistics.
    pub running_state: Vec<String>,
    /// Whether running statistics are [pooled](crate::LearnerBuilder::pool_statistics) over the
    /// micro-batches.
    pub pools_statistics: bool,
    /// Whether metrics see an output for each micro-batch, because that of the batch does not fit,
    /// or is of too many of them to be planned.
    pub metrics_see_parts: bool,
    /// Why the batch is planned again, if batches like it had another plan before.
    pub again: Option<Replanned>,
    /// The cost of planning.
    pub cost: PlanningCost,
}

impl PlanReport {
    pub(crate) fn new(device: String, budget: Bytes, phase: Phase, planned: &Planned) -> Self {
        let Planned { plan, rehearsed, joining, cost, again, .. } = planned;
        let parked: Bytes = rehearsed.state.parked.iter().map(TensorInfo::bytes).sum();
        let on_device: Bytes = rehearsed.state.on_device.iter().map(TensorInfo::bytes).sum();
        Self {
            device,
            phase,
            budget,
            plan: (**plan).clone(),
            items_meet: None,
            recomputed: rehearsed.recomputed.as_ref().map(Recomputed::report),
            recipes: rehearsed.recomputed.clone(),
            categories: rehearsed.footprint.categories,
            modules: rehearsed.modules.clone(),
            optimizer_state: on_device + parked,
            parked,
            operation: rehearsed.footprint.op.clone(),
            estimate: rehearsed.footprint.estimate,
            may_add: None,
            overhead: rehearsed.overhead,
            making: planned.making,
            paging: rehearsed.footprint.paging.clone(),
            unaccounted: rehearsed.footprint.unaccounted.clone(),
            running_state: rehearsed.of_step.running_state.clone(),
            pools_statistics: false,
            metrics_see_parts: *joining == Joining::NoRoom,
            again: *again,
            cost: *cost,
        }
    }

    /// The predicted peak.
    pub fn predicted(&self) -> Bytes {
        self.plan.peak()
    }

    /// The size of the largest micro-batch.
    pub fn micro_batch(&self) -> usize {
        self.plan.largest().get()
    }

    /// The plan on one line.
    pub fn line(&self) -> String {
        let Self { phase, plan, .. } = self;
        let (peak, estimate) = (self.predicted(), self.reliability());
        let tunes = if self.tunes() { "; planned again once kernels are tuned" } else { "" };
        let met = self.items_meet.as_ref().map(|met| format!(" because items meet in {met}"));
        let met = met.unwrap_or_default();
        let recomputed = self.recomputed.map(|again| format!(", {again}")).unwrap_or_default();
        let again = self.again.map(|why| format!("; planned again: {why}")).unwrap_or_default();
        let parts = if self.metrics_see_parts { "; metrics see micro-batches" } else { "" };
        format!(
            "{phase} batches of {}: {plan}{met}{recomputed}, predicted peak {peak} ({estimate}){tunes}{parts}{again}",
            plan.batch()
        )
    }

    /// The estimate, and whether it only holds so far.
    fn reliability(&self) -> String {
        let so_far = if self.may_add.is_some() { " so far" } else { "" };
        format!("{}{so_far}", self.estimate)
    }

    /// Whether burn's tuner has yet to choose kernels. The plan counts the candidate that needs the
    /// most memory, and the batch is planned again once the kernels are chosen.
    pub fn tunes(&self) -> bool {
        self.paging.as_ref().is_some_and(|paging| paging.tunes)
    }

    /// A warning if splitting changes what the model computes, because it normalizes by the
    /// statistics of a micro-batch.
    pub fn warning(&self) -> Option<String> {
        let trains = self.phase == Phase::Training;
        if !trains || self.plan.is_whole() || self.running_state.is_empty() {
            return None;
        }
        let mut modules: Vec<&str> = self
            .running_state
            .iter()
            .map(|path| path.rsplit_once('.').map_or(path.as_str(), |(module, _)| module))
            .collect();
        modules.dedup();
        let running = match self.pools_statistics {
            true => ", and running ones other than of `BatchNorm`,",
            false => ", and the running ones, unless `.pool_statistics(..)` is called,",
        };
        Some(format!(
            "{} normalizes over the batch: its statistics in training{running} become those of a micro-batch of {}, and \
             gradients differ from the whole batch's by that; layer or group normalization have no such coupling",
            modules.join(", "),
            self.micro_batch(),
        ))
    }
}

/// Describes the pages at the peak.
fn pages(paging: &Paging) -> String {
    let sizes = paging.pages.iter().rev().filter(|(size, _)| **size > Bytes::ZERO);
    let sizes: Vec<_> = sizes.map(|(size, count)| format!("{count} x {size}")).collect();
    let sizes = match &paging.pool {
        Some(PoolPages { lasting, step, small, beside, .. }) => {
            format!("{step} for steps + {lasting} lasting + {small} small + {beside} beside")
        }
        None => sizes.join(" + "),
    };
    let unused = paging.fragmentation() * 100.0;
    format!("{sizes}; {} in use, {unused:.0} % not", paging.in_use)
}

/// The predicted and the measured memory of a training run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// The largest predicted peak, of all plans of training and validation. Also covers planning
    /// itself, which runs parts of a step if the model reads values.
    pub predicted: Bytes,
    /// The most that the device's allocator held for training, excluding what it held before.
    /// Measured after the first batches of each plan and at the end of each epoch. On the CPU it is
    /// what the process has grown by, plus the parameters that existed before. There it includes
    /// the overhead of the system's allocator. `None` if the system does not report it, as on any
    /// CPU system other than Linux.
    pub measured: Option<Bytes>,
    /// Whether `measured` is what the process has grown by.
    pub of_process: bool,
    /// The most that the split check needed of the host's memory, in addition to what was alive
    /// then. Not part of `predicted`, which is what training takes; it was within the budget.
    pub checking: Bytes,
}

/// How many modules a plan's table names.
const MODULES: usize = 5;

/// The columns of a plan's table.
const COLUMNS: u16 = 80;

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(UTF8_BORDERS_ONLY);
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(COLUMNS);
        let steps = if self.plan.is_whole() { "whole" } else { "micro-batches" };
        table.add_row(vec!["device".to_owned(), self.device.clone()]);
        let budget = match self.budget {
            Bytes::MAX => "no limit".to_owned(),
            budget => budget.to_string(),
        };
        table.add_row(vec!["budget".to_owned(), budget]);
        table.add_row(vec![format!("batch ({steps})"), self.plan.to_string()]);
        if let Some(met) = &self.items_meet {
            table.add_row(vec!["  items meet in".to_owned(), met.clone()]);
        }
        if let Some(recomputed) = self.recomputed {
            table.add_row(vec!["recomputed".to_owned(), recomputed.to_string()]);
        }
        if self.metrics_see_parts {
            let parts =
                "see micro-batches: the output of the batch does not fit, or is of too many";
            table.add_row(vec!["metrics".to_owned(), parts.to_owned()]);
        }
        if self.parked > Bytes::ZERO {
            let parked = format!("{} of optimizer state between steps", self.parked);
            table.add_row(vec!["parked".to_owned(), parked]);
        }
        let peak = format!("{}, {}", self.predicted(), self.reliability());
        table.add_row(vec!["predicted peak".to_owned(), peak]);
        if let Some(more) = self.may_add.filter(|more| *more > Bytes::ZERO) {
            let more = format!("{more}, with the first gradient of parameters that have none here");
            table.add_row(vec!["  would add".to_owned(), more]);
        }
        table.add_row(vec!["  in the operation".to_owned(), self.operation.clone()]);
        for (category, bytes) in self.categories.iter() {
            if bytes > Bytes::ZERO {
                table.add_row(vec![format!("  {category}"), bytes.to_string()]);
            }
        }
        for (name, bytes) in self.overhead.iter().filter(|(_, bytes)| *bytes > Bytes::ZERO) {
            table.add_row(vec![format!("  of it {name}"), bytes.to_string()]);
        }
        if self.making > self.predicted() {
            let making = format!("{}, before the step", self.making);
            table.add_row(vec!["to make a batch".to_owned(), making]);
        }
        for held in self.modules.iter().filter(|held| held.module.is_some()).take(MODULES) {
            let module = held.module.as_deref().unwrap_or_default();
            table.add_row(vec!["  in a module".to_owned(), format!("{} in {module}", held.bytes)]);
        }
        if let Some(paging) = &self.paging {
            table.add_row(vec!["pages".to_owned(), pages(paging)]);
            let Paging { largest_buffer, largest_page, .. } = paging;
            let largest = match *largest_page {
                Bytes::MAX => largest_buffer.to_string(),
                limit => format!("{largest_buffer} of at most {limit}"),
            };
            table.add_row(vec!["largest buffer".to_owned(), largest]);
            if paging.tunes {
                let tunes = "not tuned yet: the largest counts, planned again once they are";
                table.add_row(vec!["kernels".to_owned(), tunes.to_owned()]);
            }
        }
        let PlanningCost { time, rehearsals, operations } = self.cost;
        let cost = format!("{time:.0?}, {rehearsals} rehearsals, {operations} operations");
        table.add_row(vec!["planning".to_owned(), cost]);
        if !self.unaccounted.is_empty() {
            table.add_row(vec!["no rule for".to_owned(), self.unaccounted.join(", ")]);
        }
        if let Some(column) = table.column_mut(0) {
            column.set_cell_alignment(CellAlignment::Left);
        }
        write!(f, "{table}")
    }
}
