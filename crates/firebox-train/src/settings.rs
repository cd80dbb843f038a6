//! The user's options, resolved on the device that will train. The builder in `learner.rs` fills
//! them in; `plan` and `fit` read them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_backend::{BoolStore, DType, Element};
use firebox_lazy::{HiddenStates, LazyBackend};
use firebox_plan::{Budget, MemoryInfo, Sizing};
use firebox_ranks::Ranks;
use firebox_recompute::Rates;
use firebox_trace::{Bytes, Difference};

use crate::check::Coupling;
use crate::device::DeviceMemory;
use crate::error::{Phase, TrainError};
use crate::parameters::{parameter_bytes, trained_parameters};
use crate::park::{Park, Parking};
use crate::planner::growth::Growth;
use crate::planner::ledger::Left;
use crate::planner::parked::Parks;
use crate::planner::recompute::RecomputePolicy;
use crate::planner::{Planned, Planner};
use crate::progress::Screen;
use crate::ranks::metrics::Metrics;
use crate::ready::OtherTensors;
use crate::reduction::LossReduction;
use crate::report::PlanReport;
use crate::whole::Joins;

/// The options of a Learner.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) budget: Budget,
    /// Whether exceeding the budget is an error.
    pub(crate) is_strict: bool,
    pub(crate) fitting: Fitting,
    /// How losses are reduced, if the user says so.
    pub(crate) reduction: Option<LossReduction>,
    /// Couplings that do not prevent a split.
    pub(crate) accepted: Vec<Coupling>,
    /// The momentum for pooling the running statistics of batch normalizations over a batch, if the
    /// user asked for it.
    pub(crate) pools_statistics: Option<f64>,
    /// How to join the outputs of a batch for the metrics.
    pub(crate) joins: Joins,
    /// The seed of each epoch's random numbers, if the user set one.
    pub(crate) seed: Option<u64>,
    /// The directory of a training that is gone on with, if the user named one.
    pub(crate) resume: Option<PathBuf>,
    /// State that steps keep outside of the model.
    pub(crate) states: HiddenStates,
    /// What the device's allocator holds for other tensors of the program, such as a data set on
    /// the device or another model.
    pub(crate) others: OtherTensors,
    /// The processes that train together, if there are several.
    pub(crate) ranks: Option<Ranks>,
    /// Whether loader threads compute their batches where the device is the host.
    pub(crate) loaders_compute: bool,
    pub(crate) telling: Telling,
}

/// How batches are made to fit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fitting {
    pub(crate) sizing: Sizing,
    /// When tensors are recomputed.
    pub(crate) recompute: RecomputePolicy,
    pub(crate) rates: Option<Rates>,
    /// Where the optimizer's state is between steps, if not on the device.
    pub(crate) park: Option<Park>,
}

/// What a run says, and who can stop it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Telling {
    pub(crate) quiet: bool,
    /// Whether the user asked to see the run.
    pub(crate) progress: bool,
    /// Where the run is shown.
    pub(crate) screen: Option<Screen>,
    /// What is to be said once burn's dashboard has left the terminal, if it is there.
    pub(crate) later: Option<Later>,
    /// Where a trace of the step is saved.
    pub(crate) trace_path: Option<PathBuf>,
    /// Where a line is written for each step.
    pub(crate) log_path: Option<PathBuf>,
    /// Where the metrics of all ranks are written.
    pub(crate) metrics_directory: Option<PathBuf>,
    /// The metrics of this rank, and at rank 0 those of all.
    pub(crate) metrics: Metrics,
    /// Whether ctrl-c ends training after the running optimizer step.
    pub(crate) stops_on_ctrl_c: bool,
}

impl Settings {
    /// How losses are reduced, where nothing else is known.
    pub(crate) fn reduction(&self) -> LossReduction {
        self.reduction.unwrap_or_default()
    }

    /// The options of this rank: only the first shows and logs.
    pub(crate) fn of_rank(self) -> Self {
        match &self.ranks {
            Some(ranks) if !ranks.is_root() => {
                let quiet =
                    Telling { quiet: true, progress: false, log_path: None, ..self.telling };
                Self { telling: Telling { trace_path: None, ..quiet }, ..self }
            }
            _ => self,
        }
    }

    /// Creates the planner for a model on its device.
    pub(crate) fn planner<B, M>(&self, model: &M) -> Result<Planner, TrainError>
    where
        B: LazyBackend<Base: DeviceMemory>,
        M: Module<B>,
    {
        let budget = self.resolve::<B, M>(model)?;
        let device = &model.devices()[0];
        let memory = B::Base::memory_model(device);
        let growth = memory.is_on_host().then(|| Growth::begin(parameter_bytes::<B, M>(model)));
        let planner = Planner::new(memory, budget, self.fitting.sizing);
        let planner = planner.recomputing(self.fitting.recompute, self.pools_statistics.is_some());
        let planner = planner
            .with_rates(self.fitting.rates.or_else(|| B::Base::rates(device)))
            .with_bools(bools::<B::Base>());
        Ok(planner.measuring(growth.flatten()))
    }

    /// Whether the Learner parks the optimizer's state, on a device whose memory is the host's or
    /// not.
    pub(crate) fn parks(&self, is_on_host: bool) -> Parks {
        match &self.fitting.park {
            None => Parks::Could,
            Some(Park::Host) if is_on_host => Parks::Could,
            Some(_) => Parks::Does,
        }
    }

    /// The place for parked state, if it `parks`. Warns if it was asked for and does not.
    ///
    /// # Errors
    ///
    /// If no file can be made.
    pub(crate) fn open_parking(&self, parks: bool) -> Result<Option<Parking>, TrainError> {
        let Some(park) = &self.fitting.park else { return Ok(None) };
        if !parks {
            self.warn(
                "the optimizer's state is in host memory already, as everything is on this device: `Park::Host` changes \
                 nothing here",
            );
            return Ok(None);
        }
        Parking::open(park).map(Some)
    }

    /// The budget in bytes: what training may use. Memory the process already holds for training
    /// counts as part of it, though it is not free. Memory it holds for other tensors does not.
    pub(crate) fn resolve<B, M>(&self, model: &M) -> Result<Bytes, TrainError>
    where
        B: LazyBackend<Base: DeviceMemory>,
        M: Module<B>,
    {
        let device = &model.devices()[0];
        let memory = match self.budget {
            Budget::Bytes(bytes) => MemoryInfo::new(bytes, bytes, "the budget"),
            _ => {
                self.share_of(B::Base::memory_info(device)?, B::Base::pool_usage(device).is_none())
            }
        };
        let budget = self.budget.resolve(&memory)?;
        Ok(match self.budget {
            Budget::Free { .. } => match B::Base::pool_usage(device) {
                Some(usage) => budget + (usage.reserved - self.others.held),
                None => budget + parameter_bytes::<B, M>(model),
            },
            _ => budget,
        })
    }

    /// The part of a memory that this rank may use. Ranks on one machine share the host's.
    fn share_of(&self, memory: MemoryInfo, is_on_host: bool) -> MemoryInfo {
        let sharing = self.ranks.as_ref().filter(|_| is_on_host).map_or(1, Ranks::local_world);
        let part = |bytes: Bytes| Bytes::new(bytes.get() / sharing as u64);
        MemoryInfo { total: part(memory.total), free: part(memory.free), ..memory }
    }

    /// Makes the report of a plan and prints it, unless `quiet`: the first plan as a table, later
    /// ones as one line. `items_meet`: where, if the batch is kept whole for that.
    pub(crate) fn report<B: LazyBackend, M: Module<B>>(
        &self,
        model: &M,
        budget: Bytes,
        (phase, planned, items_meet): (Phase, &Planned, Option<String>),
        earlier: &[PlanReport],
    ) -> PlanReport {
        let device = model.devices()[0].clone();
        let device = format!("{}, {device:?}", backend_name::<B, M>(model));
        let mut report = PlanReport::new(device, budget, phase, planned);
        report.pools_statistics = self.pools_statistics.is_some();
        report.items_meet = items_meet;
        if phase == Phase::Training {
            report.may_add = may_add::<B, M>(model, planned);
        }
        let text = if earlier.is_empty() { report.to_string() } else { report.line() };
        self.say(log::Level::Info, &text);
        let is_root = self.ranks.as_ref().is_none_or(Ranks::is_root);
        if let Some(warning) = report.warning()
            && is_root
            && earlier.iter().all(|report| report.warning().is_none())
        {
            self.warn(&warning);
        }
        let exceeds = |report: &PlanReport| report.making > report.budget;
        if exceeds(&report) && !earlier.iter().any(exceeds) {
            let (items, making) = (report.plan.batch(), report.making);
            self.warn(&format!(
                "making a {phase} batch of {items} may take {making} with what is alive between steps, and the budget is \
                 {budget}: a split changes nothing about it, but smaller batches do, and batchers that join data of the host"
            ));
        }
        if let Some(counts) =
            planned.rehearsed.of_step.counts.as_ref().filter(|_| earlier.is_empty())
        {
            self.warn_of_counting(counts);
        }
        report
    }

    /// Warns of a step that is another one each time.
    pub(crate) fn warn_of_counting(&self, difference: &Difference) {
        // What the user declares is given back after rehearsals.
        if !self.states.is_empty() {
            return;
        }
        self.warn(&format!(
            "the step is another one each time that it is called on the same items: {difference}. It is called in rehearsals, \
             and once for each micro-batch: what changes in the course of training must be computed of `firebox::clock()`, \
             not of how often it was called. Only if the host draws it at random, nothing is wrong"
        ));
    }

    pub(crate) fn warn(&self, text: &str) {
        self.say(log::Level::Warn, text);
    }

    /// Logs a text, and shows it. A logger says itself what a warning is.
    pub(crate) fn say(&self, level: log::Level, text: &str) {
        log::log!(level, "{text}");
        let warning = (level == log::Level::Warn).then(|| format!("warning: {text}"));
        let text = warning.as_deref().unwrap_or(text);
        let rank = self.ranks.as_ref().map_or(0, Ranks::rank);
        match &self.telling.screen {
            // Other ranks than the first only warn.
            _ if rank > 0 && level == log::Level::Warn => eprintln!("rank {rank}: {text}"),
            _ if self.telling.quiet => {}
            Some(screen) => screen.write(text),
            None => match &self.telling.later {
                Some(later) => later.add(text),
                None => eprintln!("{text}"),
            },
        }
    }
}

/// What is said once burn's dashboard has left the terminal: when the last clone is dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Later(Arc<Texts>);

#[derive(Debug, Default)]
struct Texts(Mutex<Vec<String>>);

impl Later {
    fn add(&self, text: &str) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).push(text.to_owned());
    }
}

impl Drop for Texts {
    fn drop(&mut self) {
        let texts = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        texts.drain(..).for_each(|text| eprintln!("{text}"));
    }
}

/// The type of a backend's booleans.
fn bools<B: Backend>() -> DType {
    let store = match <B::BoolElem as Element>::dtype() {
        DType::U8 => BoolStore::U8,
        DType::U32 => BoolStore::U32,
        _ => BoolStore::Native,
    };
    DType::Bool(store)
}

/// What parameters that a plan's rehearsal does not change would add with their first gradient.
/// `None` if there are none.
fn may_add<B: LazyBackend, M: Module<B>>(model: &M, planned: &Planned) -> Option<Bytes> {
    let left = &planned.rehearsed.of_step.left;
    let changed: BTreeSet<&str> = left.iter().flat_map(Left::paths).collect();
    let others = trained_parameters::<B, M>(model).into_iter();
    let others = others.filter(|(path, _)| !changed.contains(path.as_str()));
    let others: Bytes = others.map(|(_, bytes)| bytes).sum();
    let ratio = left.iter().map(Left::ratio).fold(0.0, f64::max);
    let is_open = ratio == 0.0 && left.iter().any(Left::reads);
    let more = others + others.scale(ratio);
    (more > Bytes::ZERO || is_open).then_some(more)
}

/// The name of the backend that runs a model.
fn backend_name<B: LazyBackend, M: Module<B>>(model: &M) -> String {
    let device = model.devices()[0].clone();
    <B::Base as Backend>::name(&device)
}
