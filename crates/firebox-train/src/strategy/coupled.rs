//! Asks before a batch is split for the first time whether its gradient is the sum over its parts.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{Learner, LearningComponentsTypes, TrainStep};
use firebox_lazy::LazyBackend;
use firebox_trace::{Bytes, MemoryModel};

use crate::check::{Check, Host, OF_STATISTICS, Outcome};
use crate::device::DeviceMemory;
use crate::error::TrainError;
use crate::micro_step::give_back;
use crate::planner::Planner;
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::weights;

/// On how many batches it is asked before it is given up.
const ATTEMPTS: usize = 8;

/// What is known of whether batches may be split.
#[derive(Clone, Copy, Debug)]
pub(super) enum Known {
    /// Nothing, on so many batches.
    Nothing { asked: usize },
    /// That they may, as long as each item weighs this: whether the weights are right where they differ was not seen, on so many
    /// batches.
    WhereItemsWeigh { each: f64, asked: usize },
    /// All that can be known.
    Enough,
}

impl Known {
    /// Whether a batch of `items` items that weigh `weight` tells more.
    fn asks(self, items: usize, weight: f64) -> bool {
        match self {
            Self::Nothing { .. } => true,
            Self::WhereItemsWeigh { each, .. } => {
                weights::differ(each * items as f64, weight, items)
            }
            Self::Enough => false,
        }
    }
}

/// A batch that is to be split.
pub(super) struct ToSplit<'a, I, S> {
    pub(super) batch: &'a I,
    pub(super) items: usize,
    pub(super) weight: f64,
    /// The items of its micro-batches, at most.
    pub(super) micro_batch: usize,
    pub(super) splitter: &'a S,
    pub(super) settings: &'a Settings,
}

/// What it is asked with.
pub(super) struct Means {
    memory: Arc<dyn MemoryModel>,
    budget: Bytes,
    held: Bytes,
    kept: Arc<AtomicU64>,
    normalizes: bool,
}

impl Means {
    /// With what is free beside `held`.
    pub(super) fn of(planner: &Planner, held: Bytes) -> Self {
        Self {
            memory: planner.memory.clone(),
            budget: planner.budget - held,
            held,
            kept: planner.kept.clone(),
            normalizes: !planner.running_state.is_empty(),
        }
    }

    /// Compares gradients, if it is not `known` yet whether the batch may be split, and gives what that needed.
    pub(super) fn ask<LC, S, M, I>(
        &self,
        known: &mut Known,
        learner: &Learner<LC>,
        to_split: &ToSplit<'_, I, S>,
    ) -> Result<Bytes, TrainError>
    where
        LC: LearningComponentsTypes<TrainingModel = M>,
        LC::Backend: LazyBackend<Base: DeviceMemory>,
        <LC::Backend as AutodiffBackend>::InnerBackend:
            LazyBackend<Base = <LC::Backend as LazyBackend>::Base>,
        M: TrainStep<Input = I> + AutodiffModule<LC::Backend> + core::fmt::Display + 'static,
        S: Splitter<I>,
    {
        let ToSplit { batch, items, weight, micro_batch, splitter, settings } = *to_split;
        if !known.asks(items, weight) {
            return Ok(Bytes::ZERO);
        }
        let mut check = Check {
            learner,
            splitter,
            batch,
            items,
            reduction: settings.reduction,
            memory: self.memory.clone(),
            budget: self.budget,
            needed: Cell::new(Bytes::ZERO),
            kept: self.kept.clone(),
            normalizes: self.normalizes,
            host: (!self.memory.is_on_host()).then(Host::new),
        };
        let mut outcome = check.run()?;
        if let (Outcome::NotCheckable(why), Some(_)) = (&outcome, check.host.take())
            && why != OF_STATISTICS
        {
            log::info!("whether batches may be split is asked on the device: {why}");
            outcome = check.run_in_thirds(micro_batch)?;
            // Thirds open pages that training does not need.
            if let Some(device) = learner.model().devices().first() {
                give_back::<LC::Backend>(device);
            }
        }
        let warn = |text: &str| settings.say(log::Level::Warn, &format!("warning: {text}"));
        let asked = match *known {
            Known::Nothing { asked } | Known::WhereItemsWeigh { asked, .. } => asked + 1,
            Known::Enough => 1,
        };
        *known = match outcome {
            Outcome::Agrees { each: Some(each) } if asked < ATTEMPTS => {
                Known::WhereItemsWeigh { each, asked }
            }
            Outcome::Agrees { .. } => Known::Enough,
            Outcome::Differs { coupling, by, parameter, first } => {
                let cause = TrainError::Coupled { coupling, by, parameter, first };
                if !settings.accepted.contains(&coupling) {
                    return Err(cause);
                }
                log::warn!("{cause}");
                Known::Enough
            }
            Outcome::NotCheckable(why) => {
                warn(&format!("whether batches may be split is not known: {why}"));
                Known::Enough
            }
            Outcome::NotEstablished(why) if asked >= ATTEMPTS => {
                warn(&format!(
                    "whether batches may be split is not known after {ATTEMPTS} of them: {why}"
                ));
                Known::Enough
            }
            Outcome::NotEstablished(why) => {
                if asked == 1 {
                    settings.say(
                        log::Level::Info,
                        &format!("whether batches may be split is not known yet: {why}; the next batches are asked"),
                    );
                }
                Known::Nothing { asked }
            }
        };
        Ok(check.needed.get() + self.held)
    }
}
