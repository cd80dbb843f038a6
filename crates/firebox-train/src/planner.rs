//! What the Learner knows of its batches: plans by phase and number of items, and the structures of micro-steps that
//! are known to fit.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_lazy::{RecordError, Recorder, forget_calls};
use firebox_plan::{Accumulating, Need, Plan, PlanError, PlanOptions, Probing, Role, Sizing, plan};
use firebox_trace::{Bytes, Category, Items, MemoryModel, StructuralHash, Trace};

use crate::error::{Phase, TrainError};
use crate::rehearsal::{Rehearsed, recording_bytes};

/// Plans, and what they were made from.
pub(crate) struct Planner {
    pub(crate) memory: Arc<dyn MemoryModel>,
    pub(crate) budget: Bytes,
    pub(crate) sizing: Sizing,
    plans: HashMap<(Phase, usize), Planned>,
    /// What micro-steps of a known structure need beside what is held.
    known: HashMap<(Phase, StructuralHash), Bytes>,
    /// The optimizer's state, which validation does not see and lives beside it.
    optimizer_state: Bytes,
    /// The paths of the running statistics of the model.
    pub(crate) running_state: Vec<String>,
    /// Whether the model is known to read values while it runs.
    reads: bool,
}

/// A plan for batches of one size.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// The rehearsal of the largest micro-batch.
    pub(crate) rehearsed: Rehearsed,
    pub(crate) cost: PlanningCost,
    /// What is alive beside a micro-step.
    pub(crate) held: Bytes,
}

/// What making a plan cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlanningCost {
    /// The time it took.
    pub time: Duration,
    /// How many rehearsals were recorded.
    pub rehearsals: usize,
    /// How many operations these had in all.
    pub operations: usize,
}

impl Planner {
    pub(crate) fn new(memory: Arc<dyn MemoryModel>, budget: Bytes, sizing: Sizing) -> Self {
        Self {
            memory,
            budget,
            sizing,
            plans: HashMap::new(),
            known: HashMap::new(),
            optimizer_state: Bytes::ZERO,
            running_state: Vec::new(),
            reads: false,
        }
    }

    /// The plan for batches of this size, if there is one already.
    pub(crate) fn planned(&self, phase: Phase, items: usize) -> Option<&Planned> {
        self.plans.get(&(phase, items))
    }

    /// What a phase may use.
    pub(crate) fn budget_of(&self, phase: Phase) -> Bytes {
        match phase {
            Phase::Training => self.budget,
            Phase::Validation => self.budget - self.optimizer_state,
        }
    }

    /// Makes the plan for batches of `items` items; `rehearse` rehearses one size with a recorder.
    ///
    /// At first no read is allowed inside a rehearsal. A model that reads values is so found before anything of a
    /// large batch has been run, and is then planned from one item upwards.
    pub(crate) fn plan(
        &mut self,
        phase: Phase,
        items: usize,
        always_accumulating: bool,
        mut rehearse: impl FnMut(
            Items,
            Accumulating,
            &Recorder,
            &dyn MemoryModel,
        ) -> Result<Rehearsed, TrainError>,
    ) -> Result<&Planned, TrainError> {
        let started = Instant::now();
        let budget = self.budget_of(phase);
        let mut cost = PlanningCost::default();
        let (plan, mut rehearsals) = loop {
            let reads = self.reads;
            let recorder = self.recorder(budget);
            let probing = if reads { Probing::FromOne } else { Probing::FromWhole };
            let options = PlanOptions::new().sizing(self.sizing).probing(probing);
            let mut rehearsals: HashMap<(usize, Accumulating), Rehearsed> = HashMap::new();
            let result = plan(Items::new(items), budget, &options, |size, accumulating| {
                let more = always_accumulating && phase == Phase::Training;
                let really = if more { Accumulating::Yes } else { accumulating };
                cost.rehearsals += 1;
                match rehearse(size, really, &recorder, self.memory.as_ref()) {
                    Ok(rehearsed) => {
                        cost.operations += rehearsed.operations;
                        let need = need_of(&rehearsed);
                        rehearsals.insert((size.get(), accumulating), rehearsed);
                        Ok(need)
                    }
                    // What comes before a read is too large already.
                    Err(TrainError::Record(RecordError::ReadTooLarge { needed, .. })) if reads => {
                        Ok(Need::heuristic(needed))
                    }
                    Err(error) => Err(error),
                }
            });
            match result {
                Err(PlanError::Footprint {
                    cause: TrainError::Record(RecordError::ReadTooLarge { .. }),
                    ..
                }) if !reads => self.reads = true,
                Err(cause) => return Err(failed(phase, cause)),
                Ok(plan) => break (plan, rehearsals),
            }
        };
        let rehearsed = plan
            .sizes()
            .filter_map(|size| rehearsals.remove(&(size.get(), plan.accumulating())))
            .max_by_key(|rehearsed| rehearsed.footprint.peak)
            .expect("every size of a plan was rehearsed");
        // Most sizes that were rehearsed do not come again.
        forget_calls();
        cost.time = started.elapsed();
        if phase == Phase::Training {
            self.optimizer_state = self.optimizer_state.max(rehearsed.optimizer_state);
            self.running_state.clone_from(&rehearsed.running_state);
        }
        let held = rehearsed.held;
        let planned = Planned { plan, rehearsed, cost, held };
        Ok(self.plans.entry((phase, items)).insert_entry(planned).into_mut())
    }

    /// The recorder for rehearsals and for micro-steps that are not known yet.
    fn recorder(&self, budget: Bytes) -> Recorder {
        let memory = self.memory.clone();
        let recorder = Recorder::new().substitute_random();
        if self.reads {
            recorder.limit_reads(budget, move |trace| memory.footprint(trace).peak)
        } else {
            recorder.refuse_reads()
        }
    }

    /// The recorder for a micro-step that will run: a read may run what comes before it if that fits beside what is
    /// held.
    pub(crate) fn step_recorder(&self, phase: Phase, held: Bytes) -> Recorder {
        let memory = self.memory.clone();
        Recorder::new().limit_reads(self.budget_of(phase) - held, move |trace| {
            memory.footprint(trace).growth()
        })
    }

    /// Whether a micro-step fits beside what is held. Its needs are looked up by its structure, and found out once.
    pub(crate) fn admit(
        &mut self,
        phase: Phase,
        trace: &Trace,
        held: Bytes,
    ) -> Result<(), TrainError> {
        let memory = self.memory.as_ref();
        let needed = self.known.entry((phase, trace.structural_hash())).or_insert_with(|| {
            memory.footprint(trace).growth() + recording_bytes(memory, trace, trace.calls().count())
        });
        let (needed, budget) = (*needed, self.budget_of(phase) - held);
        if needed > budget {
            return Err(TrainError::GrewTooLarge { phase, needed, budget });
        }
        Ok(())
    }
}

/// The errors of rehearsals come out as they are, those of planning with their phase.
fn failed(phase: Phase, cause: PlanError<TrainError>) -> TrainError {
    match cause {
        PlanError::EmptyBatch => TrainError::EmptyBatch { phase },
        PlanError::Footprint { cause, .. } => cause,
        cause => TrainError::Plan { phase, cause: Box::new(cause) },
    }
}

fn need_of(rehearsed: &Rehearsed) -> Need {
    let footprint = &rehearsed.footprint;
    let mut need = Need::new(footprint.peak, footprint.estimate);
    for (category, bytes) in footprint.categories.iter() {
        let role = match category {
            Category::Parameter | Category::OptimizerState => Role::State,
            Category::Gradient | Category::AccumulatedGradient => Role::State,
            Category::Activation => Role::Activations,
            Category::Input => Role::Inputs,
            Category::Temporary => Role::Other,
        };
        need = need.holding(category.name(), role, bytes);
    }
    need
}
