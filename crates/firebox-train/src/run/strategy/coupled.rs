//! Asks, before a batch is split for the first time, whether its gradient is the sum over its
//! parts. The check itself is in `check`.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::TensorData;
use burn::train::Learner;
use firebox_lazy::{forget_calls, in_full_precision};
use firebox_trace::{Bytes, Nonlinear, PoolPages, StructuralHash, TensorIndex, Trace};
use rustc_hash::FxHashMap;

use crate::check::{
    AROUND, Check, Coupling, Data, Found, Gift, HIDDEN_WEIGHTS, Host, LATER, Means, Numbers,
    OF_STATISTICS, Outcome, Proved, SplitCheck, ToSplit, Weight, proved_weight,
};
use crate::components::{LazyComponents, TrainBatch};
use crate::error::TrainError;
use crate::iteration::queue::give_back;
use crate::iteration::running::Give;
use crate::planner::Planner;
use crate::reduction::LossReduction;
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::weights::{self, BatchWeight};

/// How many batches are checked before giving up.
const ATTEMPTS: usize = 8;

/// What is known about whether batches may be split.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// How many batches were checked.
    asked: usize,
    asks: Asks,
    found: SplitCheck,
    later: Later,
    /// The splits that are proved, and whether parts are compared or given numbers then.
    proved: FxHashMap<(Option<StructuralHash>, Vec<usize>), bool>,
    /// What parts are given, by how their recordings begin.
    gifts: Vec<Gift>,
    /// Whether the parts of the batch that runs are compared with it or given numbers of it.
    gives: bool,
    /// Whether batches of these forms that are put together with others, and are whole, have a
    /// weight that follows from the step.
    together: FxHashMap<Option<StructuralHash>, bool>,
    /// What batches weigh beside others. The first one decides of which that is not the same.
    units: Option<Units>,
    /// What the batch that runs weighs then, and numbers of it that are known already.
    weight: Option<Weight>,
    /// What an item of the latest one weighed, and the least that it would have divided by.
    each: f64,
    floor: f64,
    /// How often a step that had become another program was proved again.
    again: usize,
    /// What the user was told of weights.
    told: Vec<&'static str>,
    numbers: Option<(Option<f64>, Numbers)>,
    /// How losses are reduced, if a proof has found it.
    reduction: Option<LossReduction>,
    /// Where items meet, if that was proved.
    items_meet: Option<String>,
    /// Whether proofs are no longer tried, because one was not found.
    unproved: bool,
    /// Whether the device compared a micro-batch with its halves, because the host could not. Later
    /// batches are not looked at then: they would need memory that is not planned.
    on_device: bool,
    /// The most that a check needed of the host's memory, next to what was alive.
    took: Bytes,
}

/// What batches weigh that are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Units {
    /// What they state.
    Stated,
    /// Their items, because nothing else is known.
    Items,
    /// What the step divides by.
    OfStep,
}

/// When batches are looked at again, once gradients have agreed: a coupling may depend on values,
/// or on the course of training.
#[derive(Clone, Copy, Debug, Default)]
struct Later {
    /// The optimizer step in which they agreed last.
    agreed: usize,
    /// How often they were looked at.
    looks: u32,
    /// Whether a part that weighs nothing was looked at.
    nothing_seen: bool,
    /// Whether a step was another program since then, and how often that was looked at.
    is_new: bool,
    news: usize,
    /// How long a look takes, and when the last one ended, where it runs on another device than
    /// training.
    pace: Option<(Duration, Instant)>,
}

/// After this many optimizer steps at the most, a batch is looked at again.
const SELDOM: usize = 1024;

/// A look that stalls a device takes at most one part in so many of the time.
const SHARE_OF_TIME: u32 = 200;

/// What is special about a batch that has just run in parts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// The optimizer step that it belongs to, counted from 1.
    pub(super) step: usize,
    /// Where its first part ends.
    pub(super) first_end: usize,
    /// The first item of a part that weighs nothing, and the first behind it.
    pub(super) nothing: Option<(usize, usize)>,
    /// Whether a part was another program than those of the batches before.
    pub(super) is_new: bool,
    /// Whether it is the last batch of training.
    pub(super) is_last: bool,
}

/// Which batches are checked from now on.
#[derive(Clone, Copy, Debug, Default)]
enum Asks {
    /// The next one.
    #[default]
    Next,
    /// One whose items have another average weight than `each`. No check has shown yet whether the
    /// weights are right where they differ.
    Unless { each: f64 },
    /// None.
    No,
}

impl Known {
    /// Whether checking a batch of `items` items with total weight `weight` would tell more.
    pub(super) fn asks(&self, items: usize, weight: f64) -> bool {
        match self.asks {
            _ if self.asked >= ATTEMPTS => false,
            Asks::Next => true,
            Asks::Unless { each } => weights::differ(each * items as f64, weight, items),
            Asks::No => false,
        }
    }

    /// Notes what the check of a batch has found. Warns where that leaves something unknown.
    ///
    /// # Errors
    ///
    /// If the batch must not be split.
    fn learn(&mut self, outcome: Outcome, settings: &Settings) -> Result<(), TrainError> {
        self.asked += 1;
        let unknown = "whether batches may be split is not known";
        (self.asks, self.found) = match outcome {
            Outcome::Agrees { each: Some(each) } => {
                // Items of equal weight say nothing about an earlier batch whose weights did not
                // show.
                let earlier = std::mem::take(&mut self.found);
                let hidden = Some(earlier).filter(|found| found.hides_weights());
                (Asks::Unless { each }, hidden.unwrap_or(SplitCheck::Agrees))
            }
            Outcome::Agrees { each: None } => (Asks::No, SplitCheck::Agrees),
            Outcome::Differs { coupling, by, parameter, at } => {
                let cause = TrainError::Coupled { coupling, by, parameter, at };
                if !settings.accepted.contains(&coupling) {
                    return Err(cause);
                }
                log::warn!("{cause}");
                (Asks::No, SplitCheck::Accepted(coupling))
            }
            Outcome::NotCheckable(why) => {
                settings.warn(&format!("{unknown}: {why}"));
                (Asks::No, SplitCheck::Unknown(why))
            }
            Outcome::NotEstablished(why) => {
                if self.asked == 1 || self.found == SplitCheck::Agrees {
                    let text = format!("{unknown} yet: {why}; the next batches are asked");
                    settings.say(log::Level::Info, &text);
                }
                (Asks::Next, SplitCheck::Unknown(why.to_owned()))
            }
        };
        if let (ATTEMPTS, Asks::Next | Asks::Unless { .. }, SplitCheck::Unknown(why)) =
            (self.asked, self.asks, &self.found)
        {
            settings.warn(&format!("{unknown} after {ATTEMPTS} of them: {why}"));
        }
        Ok(())
    }

    /// Accepts what makes gradients differ, if the user does. There is nothing to check then.
    ///
    /// # Errors
    ///
    /// `cause`, if not.
    fn accept(
        &mut self,
        coupling: Coupling,
        cause: TrainError,
        settings: &Settings,
    ) -> Result<(), TrainError> {
        if !settings.accepted.contains(&coupling) {
            return Err(cause);
        }
        if self.found != SplitCheck::Accepted(coupling) {
            log::warn!("{cause}");
            (self.asks, self.found) = (Asks::No, SplitCheck::Accepted(coupling));
        }
        Ok(())
    }

    /// The item around which to look at the gradients of a batch that has run in parts, and within
    /// which others.
    fn looks_around(&self, seen: &Seen, items: usize) -> Option<(usize, Range<usize>)> {
        let is_proved = self.found == SplitCheck::Proved;
        if !(is_proved || self.found == SplitCheck::Agrees) || self.on_device || items < 2 {
            return None;
        }
        let Later { agreed, looks, nothing_seen, is_new, news, pace } = self.later;
        let interval = 1usize.checked_shl(looks).map_or(SELDOM, |steps| steps.min(SELDOM));
        // A proof holds for the program that was recorded.
        let is_time = !is_proved && (seen.is_last || seen.step >= agreed + interval);
        // A step that is another program time and again is looked at less and less.
        let is_due = is_new && seen.step >= agreed + news || is_time;
        let is_cheap = pace.is_none_or(|(took, ended)| ended.elapsed() >= took * SHARE_OF_TIME);
        let is_first_of_nothing = seen.nothing.is_some() && !nothing_seen && !is_proved;
        if !(is_due && is_cheap || is_first_of_nothing) {
            return None;
        }
        if let Some((begin, end)) = seen.nothing {
            return Some(if begin > 0 { (begin, 0..end) } else { (end, 0..items) });
        }
        // Another place each time, with as many items on both sides as are compared.
        let places = (items + 1).saturating_sub(AROUND.0 + AROUND.1);
        let middle = match places {
            0 => items / 2,
            places => AROUND.0 + (seen.first_end + looks as usize * 7) % places,
        };
        Some((middle, 0..items))
    }

    /// The most that a check needed of the host's memory, next to what was alive.
    pub(super) fn took(&self) -> Bytes {
        self.took
    }

    /// Whether the latest split is proved.
    pub(super) fn is_proved(&self) -> bool {
        self.found == SplitCheck::Proved
    }

    /// How losses are reduced, if a proof has found it.
    pub(super) fn reduction(&self) -> Option<LossReduction> {
        self.reduction
    }

    /// Where items meet, if that keeps batches whole.
    pub(super) fn items_meet(&self) -> Option<String> {
        self.items_meet.clone()
    }

    /// Settles how losses are reduced, if no proof has found it.
    pub(super) fn settle(&mut self, reduction: LossReduction) {
        self.reduction.get_or_insert(reduction);
    }

    /// Tells the user something, once.
    fn tell(&mut self, settings: &Settings, level: log::Level, text: &'static str) {
        if !self.told.contains(&text) {
            self.told.push(text);
            settings.say(level, text);
        }
    }

    /// Notes that a batch begins, which may not be split.
    pub(super) fn begin(&mut self) {
        (self.gives, self.weight, self.numbers) = (false, None, None);
    }

    /// Whether batches weigh beside others what follows from the step, if that is not the same.
    pub(super) fn follows(&self) -> Option<bool> {
        Some(self.units? == Units::OfStep)
    }

    /// What the batch that runs weighs beside others, if that follows from the step.
    pub(super) fn weight(&self) -> Option<Weight> {
        self.weight
    }

    /// What the part `range` of a batch of weight `of` weighs. It states `stated`.
    ///
    /// # Errors
    ///
    /// If the recorded step shows that it weighs as many items as it has, and it states another
    /// share of the batch.
    pub(super) fn weighs(
        &self,
        stated: f64,
        range: Range<usize>,
        of: BatchWeight,
        settings: &Settings,
    ) -> Result<f64, TrainError> {
        let follows = self.gives || self.weight.is_some();
        match follows || self.is_proved() {
            true => proved_weight(of, stated, range, follows, settings),
            false => Ok(stated),
        }
    }

    /// Notes that a split is proved.
    fn prove(&mut self, split: (Option<StructuralHash>, Vec<usize>), gifts: Vec<Gift>) {
        self.gives = gifts.iter().any(Gift::is_any);
        self.proved.insert(split, self.gives);
        if self.gives {
            self.remember(gifts);
        }
        (self.asks, self.found) = (Asks::Next, SplitCheck::Proved);
    }

    /// Gives nothing from now on, and takes nothing as proved.
    fn give_up(&mut self) {
        self.proved.clear();
        (self.gives, self.unproved, self.asked) = (false, true, 0);
        (self.asks, self.found) = (Asks::Next, SplitCheck::NotNeeded);
    }

    fn remember(&mut self, gifts: Vec<Gift>) {
        for gift in gifts {
            if !self.gifts.contains(&gift) {
                self.gifts.push(gift);
            }
        }
    }

    pub(super) fn split_check(&self) -> SplitCheck {
        self.found.clone()
    }
}

impl SplitCheck {
    /// Whether it is unknown because weights made no difference.
    fn hides_weights(&self) -> bool {
        matches!(self, Self::Unknown(why) if why == HIDDEN_WEIGHTS)
    }
}

impl Means {
    /// Takes the memory that is free next to `held`.
    pub(crate) fn of(planner: &Planner, held: Bytes) -> Self {
        Self {
            memory: planner.memory().clone(),
            budget: planner.budget() - held,
            held,
            kept: planner.kept_by_threads().clone(),
            normalizes: planner.has_running_state(),
            nonlinear: planner.nonlinear().cloned(),
            pool: planner.pool().cloned(),
        }
    }

    /// Asks when a batch turns out too large that has pages already. They are prepared once more.
    pub(super) fn ask_midway<LC, S>(
        &self,
        known: &mut Known,
        learner: &Learner<LC>,
        (to_split, settings): (&ToSplit<'_, TrainBatch<LC>, S>, &Settings),
        pages: Option<[PoolPages; 2]>,
    ) -> Result<Bytes, TrainError>
    where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        let needed = self.ask(known, learner, (to_split, settings))?;
        let of_batch = self.pool.as_ref().zip(pages).map(|(pool, pages)| pool.prepare(pages));
        Ok(needed.max(of_batch.transpose()?.unwrap_or_default()))
    }

    pub(crate) fn check<'a, LC, S>(
        &'a self,
        learner: &'a Learner<LC>,
        of: &'a ToSplit<'a, TrainBatch<LC>, S>,
        (is_first, gives): (bool, bool),
    ) -> Check<'a, LC, S>
    where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        let host = (!self.memory.is_on_host()).then(|| Host::new(is_first));
        Check { learner, of, means: self, found: Found::default(), host, gives }
    }

    /// Looks at the gradients of a batch that has just run in parts, before they are learned from.
    ///
    /// # Errors
    ///
    /// If those of its parts no longer add up to its own.
    pub(super) fn look_again<LC, S>(
        &self,
        known: &mut Known,
        learner: &Learner<LC>,
        (to_split, settings): (&ToSplit<'_, TrainBatch<LC>, S>, &Settings),
        seen: &Seen,
    ) -> Result<(), TrainError>
    where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        known.later.is_new |= seen.is_new;
        let Some(around) = known.looks_around(seen, to_split.items) else { return Ok(()) };
        let begin = Instant::now();
        let check = self.check(learner, to_split, (false, known.gives));
        let outcome = in_full_precision(|| check.run_around(around))?;
        known.took = known.took.max(check.found.needed.get());
        let later = &mut known.later;
        later.news += usize::from(std::mem::take(&mut later.is_new));
        later.looks += 1;
        later.nothing_seen |= seen.nothing.is_some();
        if !self.memory.is_on_host() {
            later.pace = Some((begin.elapsed(), Instant::now()));
        }
        let agreed = std::mem::replace(&mut later.agreed, seen.step);
        let Outcome::Differs { .. } = outcome else { return Ok(()) };
        known.learn(outcome, settings).map_err(|cause| TrainError::CoupledSince {
            agreed,
            found: seen.step,
            cause: Box::new(cause),
        })
    }

    /// Finds out how losses are reduced, and what batches weigh, from a batch that is not split.
    /// The reduction is settled then: batches of one optimizer step are put together so.
    pub(super) fn look_at_whole<LC, S>(
        &self,
        known: &mut Known,
        learner: &Learner<LC>,
        to_split: &ToSplit<'_, TrainBatch<LC>, S>,
    ) where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        if known.together.contains_key(&to_split.form) && to_split.form.is_some() {
            return;
        }
        let check = self.check(learner, to_split, (true, false));
        let mut has_weight = false;
        let mut reduction = to_split.reduction;
        if let Proved::Exact(gifts, found) = check.prove(&to_split.parts) {
            (reduction, has_weight) = (found, gifts.iter().any(Gift::has_weight));
            known.remember(gifts);
        }
        known.settle(reduction);
        known.together.insert(to_split.form, has_weight);
        known.took = known.took.max(check.found.needed.take());
    }

    /// Finds what a batch weighs beside others, if that follows from the step, and the first batch
    /// did not say it.
    pub(super) fn weigh<LC, S>(
        &self,
        known: &mut Known,
        learner: &Learner<LC>,
        to_split: &ToSplit<'_, TrainBatch<LC>, S>,
        settings: &Settings,
    ) where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        let ToSplit { items, weight, reduction, scale, form, .. } = *to_split;
        let is = |weight: f64| !weights::differ(weight, items as f64, items);
        if reduction == LossReduction::Sum || !is(weight) {
            known.units.get_or_insert(Units::Stated);
        }
        if known.units == Some(Units::Stated) {
            return;
        }
        let check = self.check(learner, to_split, (false, true));
        known.weight = match known.units {
            Some(Units::Items) => None,
            _ if items == 1 => {
                let counted = check.count_of_one(&known.gifts).ok().flatten();
                counted.map(|counted| Weight::of(counted, known.floor))
            }
            _ => self.weight_of_step(known, &check, (form, items, scale)),
        };
        known.took = known.took.max(check.found.needed.get());
        if let Some(Weight { divisor, counted, floor }) = known.weight {
            known.floor = floor;
            // Weights of both kinds are the same.
            if known.units.is_none() && is(counted) && divisor == counted {
                return;
            }
            known.units = Some(Units::OfStep);
            if counted > 0.0 {
                known.each = counted / items as f64;
            }
        } else if known.units == Some(Units::OfStep) {
            let text = "what a batch weighs beside the others of its optimizer step does not follow from the step: it weighs as \
                 much an item as the one before it";
            known.tell(settings, log::Level::Warn, text);
            known.weight = Some(Weight::of(known.each * items as f64, 0.0));
        } else {
            known.units = Some(Units::Items);
            let is_given = known.numbers.as_ref().is_some_and(|(_, numbers)| numbers.has_any());
            if is_given || items == 1 {
                let text = "batches weigh by their items beside the others of their optimizer step: if the loss divides by \
                     what a batch counts, state that as its weight";
                let level = if is_given { log::Level::Warn } else { log::Level::Info };
                known.tell(settings, level, text);
            }
        }
    }

    /// What a batch of several items weighs beside others, as its step shows it.
    fn weight_of_step<LC, S>(
        &self,
        known: &mut Known,
        check: &Check<'_, LC, S>,
        (form, items, scale): (Option<StructuralHash>, usize, Option<f64>),
    ) -> Option<Weight>
    where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        if !(known.gives || known.together.get(&form) == Some(&true)) {
            return None;
        }
        let numbers = |known: &Known| check.numbers(0..items, &known.gifts, scale, LATER).ok();
        let mut found = numbers(known)?;
        let is_known = |known: &Known, found| known.gifts.iter().any(|gift| gift.is_of(found));
        // A step that has become another program is proved again, if that is not so time and again.
        if !is_known(known, &found) && known.again < ATTEMPTS {
            known.again += 1;
            if let Proved::Exact(gifts, _) = check.prove(&[0..items / 2, items / 2..items]) {
                known.remember(gifts);
                found = numbers(known)?;
            }
        }
        let weight = found.weight;
        known.numbers = Some((scale, found));
        weight
    }

    /// Compares gradients, unless it is already `known` whether the batch may be split. Returns the
    /// memory of the device that the check needed, including what is held. On the host the check is
    /// no part of what training takes.
    pub(super) fn ask<LC, S>(
        &self,
        known: &mut Known,
        learner: &Learner<LC>,
        (to_split, settings): (&ToSplit<'_, TrainBatch<LC>, S>, &Settings),
    ) -> Result<Bytes, TrainError>
    where
        LC: LazyComponents,
        S: Splitter<TrainBatch<LC>>,
    {
        let ToSplit { items, weight, micro_batch, form, .. } = *to_split;
        if let Some(Nonlinear { operation, parameter }) = self.nonlinear.clone() {
            let cause = TrainError::GradientsChanged { operation, parameter };
            known.accept(Coupling::Gradients, cause, settings)?;
        }
        let split = (form, to_split.parts.iter().map(Range::len).collect());
        if let Some(gives) = known.proved.get(&split).filter(|_| form.is_some()) {
            known.gives = *gives;
            return Ok(Bytes::ZERO);
        }
        let proves = !known.unproved && (known.asks(items, weight) || known.is_proved());
        if !(proves || known.asks(items, weight)) {
            return Ok(Bytes::ZERO);
        }
        let of;
        let mut check = self.check(learner, to_split, (true, false));
        let mut meet = None;
        if proves {
            let proved = check.prove(&to_split.parts);
            let needed = check.found.needed.take();
            known.took = known.took.max(needed);
            known.unproved = !matches!(proved, Proved::Exact(..));
            if known.unproved && known.is_proved() {
                known.found = SplitCheck::NotNeeded;
            }
            match proved {
                Proved::Exact(gifts, reduction) => {
                    known.prove(split, gifts);
                    known.reduction = Some(reduction);
                    if reduction != to_split.reduction {
                        let text = "the loss is a sum over the items, as recorded";
                        settings.say(log::Level::Info, text);
                    }
                    let parts = to_split.parts.clone();
                    of = ToSplit { reduction, parts, ..*to_split };
                    check.of = &of;
                    check.gives = known.gives;
                    // Elsewhere, gradients are compared all the same.
                    if !cfg!(debug_assertions) {
                        // Numbers are found for each batch.
                        let counts = known.gives && self.memory.is_on_host();
                        return Ok(if counts { needed + self.held } else { Bytes::ZERO });
                    }
                }
                Proved::Differs { coupling, parameter, at } => {
                    known.items_meet.clone_from(&at);
                    let outcome = Outcome::Differs { coupling, by: None, parameter, at };
                    known.learn(outcome, settings)?;
                    return Ok(Bytes::ZERO);
                }
                Proved::Weighs { items, stated, counted } => {
                    let coupling = Coupling::Weights;
                    let cause = TrainError::OtherWeights { items, stated, counted };
                    known.accept(coupling, cause, settings)?;
                    return Ok(Bytes::ZERO);
                }
                Proved::Meet(at) => meet = Some(at),
                Proved::Undecided(why) => {
                    log::info!("whether batches may be split is not proved: {why}");
                }
            }
        }
        known.on_device = false;
        let mut outcome = in_full_precision(|| check.run())?;
        if let (Outcome::NotCheckable(why), Some(_)) = (&outcome, check.host.take())
            && why != OF_STATISTICS
        {
            log::info!("whether batches may be split is asked on the device: {why}");
            known.on_device = true;
            outcome = in_full_precision(|| check.run_on_device(micro_batch))?;
            // Its parts opened pages that training does not need.
            if let Some(device) = learner.model().devices().first() {
                give_back::<LC::Base>(device);
            }
        }
        known.took = known.took.max(check.found.needed.get());
        if let Outcome::Differs { coupling: Coupling::Items, at, .. } = &mut outcome {
            *at = meet;
        }
        match (known.is_proved(), &outcome) {
            (true, Outcome::Differs { .. }) => {
                log::error!("a proof was wrong: please report this");
                known.learn(outcome, settings)?;
            }
            (true, _) => {}
            (false, _) => known.learn(outcome, settings)?,
        }
        if self.memory.is_on_host() {
            // No plan counts what remembering the calls of a few items takes.
            forget_calls();
            return Ok(Bytes::ZERO);
        }
        Ok((check.found.needed.get() + self.held).max(Bytes::new(check.found.pages.load(Relaxed))))
    }
}

/// Gives the parts of a batch numbers of it.
pub(super) struct Giver<'a, 'k, LC: LazyComponents, S> {
    known: &'a RefCell<&'k mut Known>,
    check: Check<'a, LC, S>,
    settings: &'a Settings,
    /// The pages of the batch, if they are prepared.
    pages: Option<[PoolPages; 2]>,
    /// The numbers, and the scale of the loss that they are of.
    numbers: Option<(Option<f64>, Numbers)>,
    /// The part that was proved last.
    latest: Range<usize>,
    /// Whether a part has been given something.
    has_given: bool,
}

impl<'a, 'k, LC, S> Giver<'a, 'k, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    pub(super) fn new(
        known: &'a RefCell<&'k mut Known>,
        (means, learner): (&'a Means, &'a Learner<LC>),
        to_split: &'a ToSplit<'a, TrainBatch<LC>, S>,
        settings: &'a Settings,
        pages: Option<[PoolPages; 2]>,
    ) -> Self {
        let check = means.check(learner, to_split, (false, true));
        let numbers = known.borrow_mut().numbers.take();
        Self { known, check, settings, pages, numbers, latest: 0..0, has_given: false }
    }

    /// The scale of the loss of a part. The whole has the same where its numbers are found.
    fn scale(&self, range: &Range<usize>) -> Option<f64> {
        let ToSplit { items, scale, reduction, .. } = *self.check.of;
        match reduction {
            LossReduction::Mean => scale.map(|scale| scale * range.len() as f64 / items as f64),
            LossReduction::Sum => scale,
        }
    }

    /// Ends a batch.
    pub(super) fn end(self) {
        let known = &mut self.known.borrow_mut();
        known.took = known.took.max(self.check.found.needed.get());
    }
}

impl<LC, S> Give for Giver<'_, '_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    fn gives(&self, range: &Range<usize>) -> bool {
        self.known.borrow().gives && range.len() < self.check.of.items
    }

    fn bytes(&self) -> Bytes {
        let numbers = self.numbers.as_ref().filter(|_| self.check.means.memory.is_on_host());
        numbers.map_or(Bytes::ZERO, |(_, numbers)| numbers.bytes())
    }

    fn prepare(&mut self, range: &Range<usize>) -> Result<(), TrainError> {
        if !self.gives(range) {
            self.numbers = None;
            return Ok(());
        }
        let scale = self.scale(range);
        self.numbers.take_if(|(of, _)| *of != scale);
        if self.numbers.is_none() {
            let gifts = &self.known.borrow().gifts;
            let numbers = match gifts.iter().any(Gift::needs_whole) {
                true => self.check.numbers(0..self.check.of.items, gifts, scale, LATER)?,
                false => Numbers::none(),
            };
            self.numbers = Some((scale, numbers));
        }
        Ok(())
    }

    fn give(
        &mut self,
        range: &Range<usize>,
        part: (&Trace, Data<'_>),
    ) -> Result<Vec<(TensorIndex, TensorData)>, TrainError> {
        let Some((_, numbers)) = &self.numbers else { return Ok(Vec::new()) };
        let of = (range, self.check.of.items);
        let given = numbers.give(&self.known.borrow().gifts, part, of)?;
        self.has_given |= !given.is_empty();
        Ok(given)
    }

    fn learn(&mut self, range: &Range<usize>) -> Result<Option<Bytes>, TrainError> {
        let ToSplit { items, .. } = *self.check.of;
        if self.latest != *range {
            self.latest = range.clone();
            if let Ok(gift) = self.check.gift(&(0..items), range, self.scale(range)) {
                self.known.borrow_mut().remember(vec![gift]);
                self.numbers = None;
                return Ok(Some(Bytes::ZERO));
            }
        }
        // Nothing of the batch depends on numbers: it goes on as one of which nothing is proved.
        let known = &mut self.known.borrow_mut();
        let Self { settings, check, pages, has_given, .. } = self;
        let weighs_by_items = check.of.weight == items as f64;
        if !known.gives || *has_given || range.start > 0 && !weighs_by_items {
            return Ok(None);
        }
        let needs = known.gifts.iter().any(Gift::is_given);
        known.give_up();
        let parts = check.of.parts.clone();
        let of = ToSplit { micro_batch: range.len(), parts, ..*check.of };
        let needed = check.means.ask_midway(known, check.learner, (&of, *settings), *pages)?;
        // What a proof says is not forgotten where nothing else is known.
        let is_known = matches!(known.found, SplitCheck::Agrees | SplitCheck::Accepted(_));
        Ok((is_known || !needs).then_some(needed))
    }
}
