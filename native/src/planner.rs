//! Plans batches: which split fits, by lines through the needs of a few small steps.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use comfy_table::Table;
use comfy_table::presets::UTF8_BORDERS_ONLY;
use firebox_plan::{Need, Plan, PlanError, PlanOptions, Role, Sizing, Split, plan};
use firebox_trace::{Bytes, Items};

#[cfg(feature = "cubecl")]
use crate::dry;
use crate::error::{Checkpointing, DoesNotFit, TrainError, panicked};
use crate::gauge::Gauge;
use crate::learner::LearnerBuilder;
use crate::progress::Planning;
use crate::rehearsal::{Iteration, Rehearsal, measured, state};

/// The smallest size of micro-batches that is rehearsed at first, and by how much sizes grow: few
/// items need little next to what does not depend on them.
const SMALLEST: usize = 2;
const GROWTH: usize = 4;

/// A plan, and how it was made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanReport {
    /// The device.
    pub device: String,
    /// The split, and the predicted peak.
    pub plan: Plan,
    /// What training may take.
    pub budget: Bytes,
    /// What is held next to a step: parameters, the batch, and from the second step on the
    /// optimizer's state.
    pub held: Bytes,
    /// The numbers of items for which steps were measured.
    pub rehearsed: Vec<usize>,
    /// How long planning took.
    pub time: Duration,
    /// The most that was held while steps were measured, on the CPU.
    pub planning: Bytes,
    /// Why nothing is predicted: the message of a step that panics on parts of its batch. Such
    /// batches run whole.
    pub unpredicted: Option<String>,
}

/// The micro-steps of a split that are recorded: up to three of each size. Of each, how many more
/// like it follow.
#[cfg(feature = "cubecl")]
pub(crate) fn recorded_parts(split: Split) -> (Vec<Range<usize>>, Vec<u32>) {
    let mut ranges = split.ranges();
    let mut parts = Vec::new();
    let mut more = Vec::new();
    for run in std::iter::once(split.first()).chain(split.rest()) {
        let taken = run.count.min(3);
        parts.extend(ranges.by_ref().take(taken));
        more.extend(
            (0..taken).map(|at| if at + 1 == taken { (run.count - taken) as u32 } else { 0 }),
        );
        ranges.by_ref().take(run.count - taken).for_each(drop);
    }
    (parts, more)
}

impl PlanReport {
    /// The first plan as a table, later ones on a line.
    pub(crate) fn text(&self, is_first: bool) -> String {
        if is_first { self.to_string() } else { self.line() }
    }

    /// The plan on one line.
    pub fn line(&self) -> String {
        let Self { plan, budget, rehearsed, time, unpredicted, .. } = self;
        if let Some(panic) = unpredicted {
            return format!(
                "{plan}, not predicted: the step panics on parts of the batch ({panic})"
            );
        }
        let peak = plan.peak();
        let by = match rehearsed.is_empty() {
            true => "by earlier steps".to_owned(),
            false => format!("by steps on {rehearsed:?} items in {time:.1?}"),
        };
        format!("{plan}: {peak} of {budget} predicted, {by}")
    }
}

/// A table.
impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, plan, budget, held, rehearsed, time, .. } = self;
        if self.unpredicted.is_some() {
            return f.write_str(&self.line());
        }
        let steps = if plan.is_whole() { "whole" } else { "micro-batches" };
        let sizes: Vec<String> = rehearsed.iter().map(usize::to_string).collect();
        let mut table = Table::new();
        table.load_preset(UTF8_BORDERS_ONLY);
        let rows = [
            ("device".to_owned(), device.clone()),
            ("budget".to_owned(), budget.to_string()),
            (format!("batch ({steps})"), plan.to_string()),
            ("predicted peak".to_owned(), format!("{}, {}", plan.peak(), plan.estimate())),
            ("  held before the step".to_owned(), held.to_string()),
            ("  added by the step".to_owned(), (plan.peak() - *held).to_string()),
            ("planning".to_owned(), format!("{time:.1?}, steps on {} items", sizes.join(", "))),
        ];
        table.add_rows(rows.map(|(name, value)| vec![name, value]));
        write!(f, "{table}")
    }
}

/// How batches may be planned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) budget: Bytes,
    /// The bytes of the parameters and running statistics.
    pub(crate) parameters: Bytes,
    /// What training takes of the device when it begins.
    pub(crate) at_first: Bytes,
    /// Whether batches may be split.
    pub(crate) splits: bool,
    /// Whether the gradients of several batches are summed.
    pub(crate) accumulates: bool,
    /// Whether it is the Learner that trains, with metrics that compute on outputs.
    pub(crate) is_learners: bool,
    /// Whether planning shows.
    pub(crate) shows: bool,
}

/// The shapes of a batch's items: batches of as many items may have other lengths.
pub(crate) type Shapes = Vec<Vec<usize>>;

/// What is known of items of one shape.
#[derive(Default)]
struct Known {
    /// Micro-steps on two parts of so many items each, measured.
    measured: BTreeMap<usize, Iteration>,
    /// A whole batch of so many items, whose gradient is no sum.
    whole: BTreeMap<usize, Iteration>,
    /// The items from which on a tensor is larger than any buffer, a tensor, and a buffer.
    too_large: Option<TooLarge>,
    /// The plans for batches of so many items.
    plans: BTreeMap<usize, Plan>,
}

/// From so many items on, there is such a tensor, larger than such a buffer.
type TooLarge = (usize, Bytes, Bytes);

/// The needs of iterations, and the plans made of them.
pub(crate) struct Planner {
    gauge: Gauge,
    /// How steps are rehearsed on a GPU.
    #[cfg(feature = "cubecl")]
    runs: dry::Runs,
    options: Options,
    /// What was held when training began, with the parameters.
    before: Bytes,
    known: BTreeMap<Shapes, Known>,
    /// The shapes and the number of the latest batch's items.
    latest: Option<(Shapes, usize)>,
    /// What was held before the latest rehearsal: pages that one has opened may be of use to
    /// training, and cannot always be given back.
    held: Bytes,
    /// The optimizer's state. On the host it is part of what is held once an update has run, on a
    /// GPU of what is rehearsed before. `None` before the first rehearsal.
    state: Option<Bytes>,
    has_stepped: bool,
    /// How much more than predicted steps took at the most.
    caution: f64,
    /// The most items of a micro-batch, after larger ones have failed.
    most: usize,
    /// The items of a micro-batch of the latest plan.
    size: usize,
    /// The most that was predicted, and that a step was measured to take.
    predicted: Bytes,
    peak: Bytes,
    /// The most that was held while the latest plan was made, on the host.
    planning: Bytes,
}

impl Planner {
    pub(crate) fn new(gauge: Gauge, options: Options) -> Self {
        Self {
            before: gauge.live(),
            has_stepped: false,
            gauge,
            #[cfg(feature = "cubecl")]
            runs: dry::Runs::Dry,
            options,
            known: BTreeMap::new(),
            latest: None,
            held: Bytes::ZERO,
            state: None,
            caution: 1.0,
            most: usize::MAX,
            size: usize::MAX,
            predicted: Bytes::ZERO,
            peak: Bytes::ZERO,
            planning: Bytes::ZERO,
        }
    }

    pub(crate) fn gauge(&self) -> &Gauge {
        &self.gauge
    }

    pub(crate) fn budget(&self) -> Bytes {
        self.options.budget
    }

    /// The most that was predicted, and that a step was measured to take.
    pub(crate) fn predicted_and_measured(&self) -> (Bytes, Bytes) {
        (self.predicted, self.peak)
    }

    /// The most items of a micro-batch, if larger ones have failed.
    pub(crate) fn most(&self) -> Option<usize> {
        Some(self.most).filter(|most| *most < usize::MAX)
    }

    /// The items of a micro-batch for batches that are not trained on: as their like in training,
    /// or otherwise as many as training has room for. Of longer items fewer, as they grow.
    pub(crate) fn size_of(&self, shapes: &Shapes, items: usize) -> usize {
        let planned = self.planned(shapes, items).map(|plan| plan.largest().get());
        let elements = |shapes: &Shapes| {
            shapes.iter().map(|sides| sides.iter().product::<usize>()).sum::<usize>().max(1)
        };
        let of_others = self.known.iter().flat_map(|(others, known)| {
            let shorter = (elements(others) as f64 / elements(shapes) as f64).min(1.0);
            known.plans.values().map(move |plan| (plan.largest().get() as f64 * shorter) as usize)
        });
        let size = planned.or(of_others.max()).unwrap_or(self.size).min(self.most);
        size.clamp(1, items.max(1))
    }

    /// Compares what a batch took for which nothing was predicted with the budget.
    ///
    /// # Errors
    ///
    /// If it is more, and that is an error.
    pub(crate) fn compare_another(
        &mut self,
        peak: Bytes,
        settings: &LearnerBuilder,
    ) -> Result<(), TrainError> {
        let (measured, budget) = (self.taken(peak), self.options.budget);
        let is_new = measured > self.peak;
        self.peak = self.peak.max(measured);
        if measured <= budget || !is_new {
            return Ok(());
        }
        let error = TrainError::OverBudget { measured, predicted: self.predicted, budget };
        if settings.is_strict {
            return Err(error);
        }
        settings.say(log::Level::Warn, &error.to_string());
        Ok(())
    }

    /// Notes that something else than training has run.
    pub(crate) fn has_run_another(&mut self) {
        self.latest = None;
    }

    /// What training takes where the process holds `live`.
    pub(crate) fn taken(&self, live: Bytes) -> Bytes {
        self.options.at_first + (live - self.before)
    }

    /// The plan for a batch that comes next, if there is one: without it, the batch is
    /// [planned](Self::plan).
    pub(crate) fn known(&mut self, batch: &(Shapes, usize)) -> Option<Plan> {
        let is_another = self.latest.as_ref() != Some(batch);
        if is_another {
            self.latest = Some(batch.clone());
        }
        let plan = self.planned(&batch.0, batch.1)?;
        if is_another {
            // Pages that other batches have left are none of this one's.
            self.gauge.give_back();
        }
        Some(plan)
    }

    /// Plans batches of `items` items.
    ///
    /// # Errors
    ///
    /// If one item does not fit.
    pub(crate) fn plan(
        &mut self,
        rehearsal: &mut impl Rehearsal,
        (shapes, items): (Shapes, usize),
    ) -> Result<PlanReport, TrainError> {
        // It goes back where it came from, whatever comes of it.
        let mut known = self.known.remove(&shapes).unwrap_or_default();
        self.planning = Bytes::ZERO;
        let planned = match self.plan_anew(rehearsal, items, &mut known) {
            Err(TrainError::StepPanicked { message }) if !known.is_measured() => {
                self.unpredicted(message, items, &mut known)
            }
            planned => planned,
        };
        self.known.insert(shapes, known);
        planned
    }

    /// The plan for a batch whose step panics on parts of it. Its peak is the budget.
    fn unpredicted(
        &mut self,
        message: String,
        items: usize,
        known: &mut Known,
    ) -> Result<PlanReport, TrainError> {
        let budget = self.options.budget;
        let plan = Plan::of_split(budget, Split::whole(items), Need::heuristic(budget));
        let Some(plan) = plan else { return Err(TrainError::StepPanicked { message }) };
        known.plans.insert(items, plan.clone());
        let held = self.taken(self.held);
        let (device, unpredicted) = (self.gauge.name(), Some(message));
        let (rehearsed, time, planning) = (Vec::new(), Duration::ZERO, self.planning);
        Ok(PlanReport { device, plan, budget, held, rehearsed, time, planning, unpredicted })
    }

    /// The plan for batches of items of these shapes: their own, or that of a batch that is longer,
    /// but not by much.
    fn planned(&self, shapes: &Shapes, items: usize) -> Option<Plan> {
        if let Some(plan) = self.known.get(shapes).and_then(|known| known.plans.get(&items)) {
            return Some(plan.clone());
        }
        let longer = self.known.iter().filter(|(longer, _)| is_a_little_longer(longer, shapes));
        longer
            .filter_map(|(_, known)| known.plans.get(&items))
            .min_by_key(|plan| plan.len())
            .cloned()
    }

    /// Measures steps on items of one shape, and plans with what is known of them.
    fn plan_anew(
        &mut self,
        rehearsal: &mut impl Rehearsal,
        items: usize,
        known: &mut Known,
    ) -> Result<PlanReport, TrainError> {
        let begin = Instant::now();
        let mut progress = Planning::begin(items, self.options.shows);
        let mut rehearsed = Vec::new();
        // Two parts: the sum of gradients exists in the second.
        let two = |size: usize| -> Vec<Range<usize>> {
            let second = if 2 * size <= items { size..2 * size } else { items - size..items };
            vec![0..size, second]
        };
        let mut size = SMALLEST.min(items);
        self.gauge.give_back();
        self.held = self.gauge.live();
        // Fewer items than were measured need no steps of their own, which would take the state of
        // another optimizer beside that of training.
        if self.gauge.is_of_host() && self.has_stepped {
            let held = self.taken(self.held);
            let found = self.search(known, items, held).ok();
            if let Some(plan) = found.filter(|plan| known.reaches(plan.largest().get())) {
                return Ok(self.report(known, plan, (held, rehearsed, begin.elapsed())));
            }
        }
        // On the host, the state stays for all that is measured now.
        if self.state.is_none() || self.gauge.is_of_host() {
            self.state = Some(self.first(rehearsal, &two(size))?);
        }
        // From few items to many, as far as they are predicted to fit.
        let (plan, held) = loop {
            if !known.has(size, items) {
                let is_whole = size == items && !self.options.accumulates;
                let parts = if is_whole { 1 } else { 2 };
                progress.rehearses(size);
                let found = self.measure(rehearsal, &two(size)[..parts])?;
                log::debug!("parts of {size} items: {found:?}");
                let of = if is_whole { &mut known.whole } else { &mut known.measured };
                match found {
                    Ok(found) => drop(of.insert(size, found)),
                    Err(too_large) => known.too_large = Some(too_large),
                }
                rehearsed.push(size);
            }
            let held = self.taken(self.held);
            match self.search(known, items, held) {
                // A whole batch has no sum of gradients, which every split has.
                Err(_) if !rehearsed.contains(&items) && self.may_fit_whole(known, items, held) => {
                    size = items;
                }
                // One item may fit where two do not.
                Err(_) if !known.has(1, items) && !rehearsed.contains(&1) => size = 1,
                Err(cause) => {
                    let unfit = DoesNotFit { cause, checkpointing: None };
                    return Err(TrainError::DoesNotFit(unfit.into()));
                }
                Ok(plan) => {
                    let wanted = plan.largest().get();
                    let is_known = match plan.is_whole() {
                        true => known.has(wanted, items),
                        false => known.measured.contains_key(&wanted),
                    };
                    let most = known.measured.keys().next_back().copied().unwrap_or(1);
                    size = wanted.min(GROWTH * most);
                    // The rehearsal has an optimizer's state of its own.
                    let own = self.state.filter(|_| self.has_stepped).unwrap_or_default();
                    if plan.peak() + own > self.options.budget && !rehearsed.is_empty() {
                        break (plan, held);
                    }
                    if is_known || known.measured.contains_key(&size) || rehearsed.contains(&size) {
                        break (plan, held);
                    }
                }
            }
        };
        Ok(self.report(known, plan, (held, rehearsed, begin.elapsed())))
    }

    /// Takes over a plan.
    fn report(
        &mut self,
        known: &mut Known,
        plan: Plan,
        (held, rehearsed, time): (Bytes, Vec<usize>, Duration),
    ) -> PlanReport {
        self.predicted = self.predicted.max(plan.peak());
        self.size = plan.largest().get();
        known.plans.insert(plan.batch().get(), plan.clone());
        let (device, budget, planning) = (self.gauge.name(), self.options.budget, self.planning);
        let unpredicted = None;
        PlanReport { device, plan, budget, held, rehearsed, time, planning, unpredicted }
    }

    /// Whether a whole batch, which is not measured, may fit where no split of it does.
    fn may_fit_whole(&self, known: &Known, items: usize, held: Bytes) -> bool {
        // Two sizes tell how a step grows with its items.
        let is_open = !self.options.accumulates
            && !known.has(items, items)
            && known.measured.len() > 1
            && items <= self.most;
        let own = self.state.filter(|_| self.has_stepped).unwrap_or_default();
        let added = self.added(known, items, Split::whole(items)) - self.options.parameters;
        is_open && held + added + own <= self.options.budget
    }

    /// How a batch that does not fit would be planned with burn's gradient checkpointing, which
    /// `rehearsal` has.
    ///
    /// # Errors
    ///
    /// If the step fails.
    pub(crate) fn checkpointed(
        &mut self,
        rehearsal: &mut impl Rehearsal,
        (shapes, items): (Shapes, usize),
    ) -> Result<Checkpointing, TrainError> {
        let mut known = Known::default();
        let (need, split) = match self.plan_anew(rehearsal, items, &mut known) {
            Ok(report) => (report.plan.peak(), Some(report.plan.split())),
            Err(TrainError::DoesNotFit(unfit)) => (unfit.need(), None),
            Err(error) => return Err(error),
        };
        let as_it_is = self.known.get(&shapes);
        let percent = as_it_is.and_then(|as_it_is| {
            let both = |of: fn(&Known) -> &BTreeMap<usize, Iteration>| {
                let again = of(&known).iter();
                let mut pairs = again.filter_map(|(size, it)| Some((it, of(as_it_is).get(size)?)));
                pairs.next().map(|(again, once)| again.cost / once.cost)
            };
            both(|known| &known.measured).or(both(|known| &known.whole))
        });
        let percent = percent.map(|ratio| (100.0 * (ratio - 1.0)).max(0.0));
        Ok(Checkpointing { need, split, percent })
    }

    /// Writes a page about where the memory of a plan goes.
    ///
    /// # Errors
    ///
    /// If the step fails, or the page cannot be written.
    #[cfg(feature = "cubecl")]
    pub(crate) fn write_report(
        &self,
        rehearsal: &mut impl Rehearsal,
        report: &PlanReport,
        path: &Path,
    ) -> Result<(), TrainError> {
        let Gauge::Pools(device) = &self.gauge else { return Ok(()) };
        let (parts, more) = recorded_parts(report.plan.split());
        let recorded =
            dry::recorded(rehearsal, &parts, device, (self.runs, dry::Iterations::Second))?;
        recorded.finish(&more).write(report, path)
    }

    /// The host has nothing to write a report from.
    #[cfg(not(feature = "cubecl"))]
    pub(crate) fn write_report(
        &self,
        _rehearsal: &mut impl Rehearsal,
        _report: &PlanReport,
        _path: &Path,
    ) -> Result<(), TrainError> {
        Ok(())
    }

    /// What a first small iteration shows: the optimizer's state.
    fn first(
        &mut self,
        rehearsal: &mut impl Rehearsal,
        parts: &[Range<usize>],
    ) -> Result<Bytes, TrainError> {
        #[cfg(feature = "cubecl")]
        if let Gauge::Pools(device) = &self.gauge {
            self.runs = dry::how(rehearsal, parts, device)?;
            return Ok(Bytes::ZERO);
        }
        let (state, peak) = self.gauge.peak_of(|| caught(|| state(rehearsal, parts, &self.gauge)));
        self.planning = self.planning.max(self.taken(peak));
        state
    }

    /// What an iteration on these parts takes. An error inside if the device makes no buffers
    /// as large.
    fn measure(
        &mut self,
        rehearsal: &mut impl Rehearsal,
        parts: &[Range<usize>],
    ) -> Result<Result<Iteration, TooLarge>, TrainError> {
        #[cfg(feature = "cubecl")]
        if let Gauge::Pools(device) = &self.gauge {
            let place = dry::Place {
                device,
                runs: self.runs,
                has_state: self.has_stepped,
                is_learners: self.options.is_learners,
            };
            let found = dry::iteration(rehearsal, parts, place)?;
            if found.largest > found.most {
                // Tensors grow with the number of items, and not faster.
                let size = parts[0].len();
                let items = (size as f64 / found.largest.ratio(found.most)) as usize + 1;
                return Ok(Err((items.min(size), found.largest, found.most)));
            }
            self.held = found.held;
            return Ok(Ok(found.iteration));
        }
        let before = self.gauge.live();
        let found = caught(|| measured(rehearsal, parts, &self.gauge))?;
        self.planning = self.planning.max(self.taken(before + found.added));
        self.held = self.gauge.live() - self.state.unwrap_or_default();
        Ok(Ok(found))
    }

    /// The fewest micro-batches that fit next to what is held.
    fn search(
        &self,
        known: &Known,
        items: usize,
        held: Bytes,
    ) -> Result<Plan, PlanError<Infallible>> {
        let need = |split: Split| {
            let added = self.added(known, items, split);
            let mut need = Need::heuristic(held + added);
            if split.largest().get() > self.most {
                need = Need::lower_bound(Bytes::MAX);
            }
            if let Some((items, tensor, buffer)) = known.too_large
                && split.largest().get() >= items
            {
                need = need.oversized(tensor, buffer);
            }
            Ok(need
                .holding("parameters, optimizer state and the batch", Role::State, held)
                .holding("activations and gradients", Role::Activations, added))
        };
        let sizing = if self.options.splits { Sizing::Even } else { Sizing::Whole };
        plan(Items::new(items), self.options.budget, &PlanOptions::new().sizing(sizing), need)
    }

    /// What an iteration adds, with the optimizer's state until it is held. With a margin for what
    /// no measurement has shown.
    fn added(&self, known: &Known, items: usize, split: Split) -> Bytes {
        let size = split.largest().get();
        let whole = known.whole.get(&size).filter(|_| size == items && !self.options.accumulates);
        let iteration = match whole {
            Some(whole) => whole.added,
            None => {
                let (added, outputs) = (known.on_line(size), known.outputs(items));
                // Metrics see all outputs of a batch, which are joined.
                let joined = if self.options.is_learners { outputs } else { Bytes::ZERO };
                added + (outputs + joined - known.outputs(2 * size))
            }
        };
        let state = self.state.filter(|_| !self.has_stepped).unwrap_or_default();
        // The sum of a group's earlier batches is kept until the device has computed this one.
        let kept = match self.options.accumulates && !self.gauge.is_of_host() {
            true => self.options.parameters,
            false => Bytes::ZERO,
        };
        let added = (iteration + state + kept).scale(self.caution);
        match self.gauge.is_exact() {
            true => added.scale(1.02) + Bytes::kib(64),
            false => added.scale(1.1) + Bytes::mib(8),
        }
    }

    /// Notes that the optimizer has stepped.
    pub(crate) fn has_stepped(&mut self) {
        // What was rehearsed before counts the optimizer's state, which is held from now on.
        if !self.has_stepped && !self.gauge.is_of_host() {
            self.known.values_mut().for_each(Known::forget_steps);
        }
        self.has_stepped = true;
    }

    /// A plan with micro-batches of half the size, for one that the device could not compute.
    /// Others become no larger either. `None` for one item, and where nothing may be split.
    pub(crate) fn halve(&mut self, shapes: Shapes, plan: &Plan) -> Option<Plan> {
        let (items, largest) = (plan.batch().get(), plan.largest().get());
        if largest == 1 || !self.options.splits {
            return None;
        }
        self.most = largest.div_ceil(2);
        let split = Split::even(items, items.div_ceil(self.most));
        let halved = Plan::of_split(plan.budget(), split, Need::heuristic(plan.peak()))?;
        for known in self.known.values_mut() {
            known.plans.retain(|_, plan| plan.largest().get() <= self.most);
        }
        self.known.entry(shapes).or_default().plans.insert(items, halved.clone());
        Some(halved)
    }

    /// Compares what an iteration of a plan took with its prediction, where the process held at
    /// most `peak`. After more than predicted, batches are measured and planned anew.
    ///
    /// # Errors
    ///
    /// If it is more than the budget, and that is an error.
    pub(crate) fn compare(
        &mut self,
        plan: &Plan,
        peak: Bytes,
        settings: &LearnerBuilder,
    ) -> Result<(), TrainError> {
        let (predicted, budget) = (plan.peak(), self.options.budget);
        if predicted == budget {
            return self.compare_another(peak, settings);
        }
        let Some(measured) = self.note(plan, peak) else { return Ok(()) };
        if measured > budget {
            let error = TrainError::OverBudget { measured, predicted, budget };
            if settings.is_strict {
                return Err(error);
            }
            settings.say(log::Level::Warn, &format!("{error}: batches are planned anew"));
        } else {
            log::info!("a step took {measured} where {predicted} were predicted");
        }
        Ok(())
    }

    /// Notes what an iteration of a plan took. Returns it if it is more than predicted.
    fn note(&mut self, plan: &Plan, peak: Bytes) -> Option<Bytes> {
        let taken = self.taken(peak);
        self.peak = self.peak.max(taken);
        if taken <= plan.peak() {
            return None;
        }
        let own = plan.asked().iter().find(|answer| answer.split == plan.split());
        let held = own.map_or(Bytes::ZERO, |answer| answer.need.held_by(Role::State));
        let added = (plan.peak() - held).max(Bytes::new(1));
        self.caution *= (taken - held).ratio(added).max(1.0);
        self.known.clear();
        Some(taken)
    }
}

impl Known {
    /// Whether parts of a size are measured, for a batch of so many items.
    fn has(&self, size: usize, items: usize) -> bool {
        self.measured.contains_key(&size) || size == items && self.whole.contains_key(&size)
    }

    fn is_measured(&self) -> bool {
        !(self.measured.is_empty() && self.whole.is_empty())
    }

    /// Whether as many items or more are measured.
    fn reaches(&self, items: usize) -> bool {
        self.measured.keys().chain(self.whole.keys()).any(|size| *size >= items)
    }

    fn forget_steps(&mut self) {
        self.measured.clear();
        self.whole.clear();
    }

    /// The outputs of so many items.
    fn outputs(&self, items: usize) -> Bytes {
        let of = self.measured.iter().next_back();
        of.map_or(Bytes::ZERO, |(size, it)| it.outputs.scale(items as f64 / (2 * size) as f64))
    }

    /// What parts of `items` items take: as measured, or on the line through the sizes around it.
    /// Beyond the largest size, the steepest line through that and one of at most half of it: less
    /// apart, pages that are opened as a whole say nothing. What is chosen is measured.
    fn on_line(&self, items: usize) -> Bytes {
        let measured = if self.measured.is_empty() { &self.whole } else { &self.measured };
        let at = |(size, it): (&usize, &Iteration)| (*size as f64, it.added.get() as f64);
        let below = measured.range(..=items).next_back().map(at);
        let above = measured.range(items..).next().map(at);
        let slope = |one: (f64, f64), other: (f64, f64)| (other.1 - one.1) / (other.0 - one.0);
        let bytes = match (below, above) {
            (Some(below), Some(above)) if below.0 < above.0 => {
                below.1 + slope(below, above) * (items as f64 - below.0)
            }
            (_, Some(above)) => above.1,
            (Some(last), None) => {
                let few = measured.iter().map(at).filter(|few| 2.0 * few.0 <= last.0);
                let steepest = few.map(|few| slope(few, last)).fold(0.0, f64::max);
                last.1 + steepest * (items as f64 - last.0)
            }
            (None, None) => 0.0,
        };
        Bytes::new(bytes as u64)
    }
}

/// Turns a panic of the user's step into an error.
fn caught<T>(work: impl FnOnce() -> Result<T, TrainError>) -> Result<T, TrainError> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panicked(&*panic)).flatten()
}

/// How much longer a batch may be whose plan another one takes over.
const LONGER: f64 = 1.25;

/// Whether items of one shape are as long as those of another, or longer by at most a quarter.
fn is_a_little_longer(longer: &Shapes, shapes: &Shapes) -> bool {
    let sides = |shapes: &Shapes| shapes.concat();
    let is_alike = longer.iter().map(Vec::len).eq(shapes.iter().map(Vec::len));
    let fits = |(longer, side): (&usize, &usize)| {
        (*side..=(*side as f64 * LONGER) as usize).contains(longer)
    };
    is_alike && sides(longer).iter().zip(&sides(shapes)).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planner(budget: Bytes, measured: &[(usize, u64)]) -> Planner {
        let options = Options {
            budget,
            parameters: Bytes::ZERO,
            at_first: Bytes::ZERO,
            splits: true,
            accumulates: false,
            is_learners: true,
            shows: false,
        };
        let mut planner = Planner::new(Gauge::Heap, options);
        let steps = |mib: u64| Iteration { added: Bytes::mib(mib), ..Iteration::default() };
        let measured = measured.iter().map(|(size, mib)| (*size, steps(*mib))).collect();
        planner.known.insert(vec![], Known { measured, ..Known::default() });
        planner
    }

    impl Planner {
        fn only(&self) -> &Known {
            &self.known[&Vec::new()]
        }
    }

    #[test]
    fn needs_lie_between_those_of_measured_sizes_and_go_on_as_steeply() {
        let planner = planner(Bytes::mib(100), &[(2, 6), (4, 8), (8, 14)]);
        let at = |items| planner.only().on_line(items).get() as f64 / f64::from(1 << 20);
        assert_eq!([1, 2, 3, 5, 8, 16].map(at), [6.0, 6.0, 7.0, 9.5, 14.0, 26.0]);
        // A page that two sizes lie on either side of.
        let planner = self::planner(Bytes::mib(100), &[(2, 8), (32, 8), (40, 16)]);
        let at = planner.only().on_line(118).get() as f64 / f64::from(1 << 20);
        assert!((30.0..34.0).contains(&at), "{at}");
    }

    #[test]
    fn the_fewest_micro_batches_that_fit_are_taken() {
        let split = |budget| {
            let planner = planner(Bytes::mib(budget), &[(2, 12), (4, 14), (8, 18)]);
            planner.search(planner.only(), 100, Bytes::ZERO)
        };
        assert_eq!(split(200).expect("it fits").to_string(), "100 = 1 x 100");
        assert_eq!(split(40).expect("it fits").len(), 4);
        let error = split(8).expect_err("nothing fits").to_string();
        assert!(error.contains("one item needs"), "{error}");
    }

    #[test]
    fn steps_that_take_more_than_predicted_are_planned_more_carefully() {
        let measured = [(2, 12), (4, 14), (8, 18)];
        let mut planner = planner(Bytes::mib(60), &measured);
        let plan = planner.search(planner.only(), 100, Bytes::ZERO).expect("it fits");
        let before = planner.before;
        assert_eq!(planner.note(&plan, before + Bytes::mib(1)), None);
        assert!(planner.note(&plan, before + Bytes::mib(90)).is_some());
        assert!(planner.known.is_empty());
        planner.known = self::planner(Bytes::ZERO, &measured).known;
        assert!(
            planner.search(planner.only(), 100, Bytes::ZERO).expect("it fits").len() > plan.len()
        );
    }

    #[test]
    fn batches_take_over_the_plan_of_those_that_are_a_little_longer() {
        let shapes = |length: usize| vec![vec![length, 64], vec![]];
        let is = |longer, length| is_a_little_longer(&shapes(longer), &shapes(length));
        assert!(is(100, 100) && is(100, 80));
        assert!(!is(100, 79) && !is(100, 101));
        assert!(!is_a_little_longer(&vec![vec![100, 64]], &shapes(100)));
    }
}
