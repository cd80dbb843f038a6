//! Tests of plans that follow other plans, on a memory model that is fully known: each trace has
//! one tensor, and one page for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Shape as TensorShape};
use firebox_heap::Heap;
use firebox_lazy::{Recorder, Rehearsal};
use firebox_plan::{Need, PlanOptions, Split};
use firebox_trace::{
    Category, EarlierPages, Footprint, Items, Origin, Paging, Question, TensorType,
};

use super::search::may_run_in_fewer_steps;
use super::*;
use crate::error::TrainError;

/// Page sizes are multiples of this many MiB.
const PAGE: u64 = 10;

/// One page for all tensors of a trace. Earlier traces have pages of their own, which stay open and
/// are used again if they have the same size.
#[derive(Debug, Default)]
struct Pool {
    /// While this is above zero, footprints count kernels that are not chosen yet, which need twice
    /// as much.
    untuned: AtomicUsize,
}

impl Pool {
    fn page(trace: &Trace) -> Bytes {
        let bytes: Bytes = trace.tensors.iter().map(TensorInfo::bytes).sum();
        Bytes::mib(bytes.get().div_ceil(1 << 20).next_multiple_of(PAGE))
    }

    fn footprint_beside(trace: &Trace, others: &[&Trace]) -> Footprint {
        let others = others.iter().map(|other| Self::page(other));
        let pages: BTreeSet<Bytes> = others.chain([Self::page(trace)]).collect();
        let reserved = pages.iter().copied().sum();
        let mut footprint = Heap::simple().footprint(trace);
        footprint.categories.add(Category::Temporary, reserved - footprint.peak);
        footprint.peak = reserved;
        let pages: BTreeMap<Bytes, usize> = pages.into_iter().map(|page| (page, 1)).collect();
        let largest_page = Bytes::gib(1);
        footprint.paging = Some(Paging { reserved, pages, largest_page, ..Paging::default() });
        footprint
    }
}

impl MemoryModel for Pool {
    fn name(&self) -> &str {
        "pool"
    }

    fn answer(&self, question: &Question<'_>) -> Footprint {
        let before = match question.pages {
            EarlierPages::Keep => question.before,
            EarlierPages::GiveBack => &[],
        };
        let mut footprint = Self::footprint_beside(question.trace, before);
        let tunes = self.untuned.load(Ordering::Relaxed) > 0;
        if let Some(paging) = footprint.paging.as_mut().filter(|_| tunes) {
            paging.tunes = true;
            footprint.categories.add(Category::Temporary, footprint.peak);
            footprint.peak = footprint.peak * 2;
        }
        footprint
    }

    fn key(&self) -> Option<String> {
        Some(format!("{self:?}"))
    }
}

/// A rehearsal of micro-batches with one MiB per item.
fn rehearsal(split: Split) -> Rehearsal {
    let rows = TensorShape::new([split.largest().get(), 1 << 18]);
    let ty = TensorType { shape: rows, dtype: DType::F32 };
    let batch = TensorInfo::new(ty.into(), Origin::Existing);
    let trace = Trace { tensors: vec![batch], ..Trace::default() };
    Rehearsal { trace, survivors: Vec::new(), replaced: Vec::new() }
}

fn planner(budget: u64) -> Planner {
    Planner::new(Arc::new(Pool::default()), Bytes::mib(budget), Sizing::Even, None)
}

/// Plans batches of `items` items. Returns the plan, the splits that were rehearsed for it, and
/// what must be done first.
fn run(planner: &mut Planner, items: usize) -> (String, Vec<String>, Admission) {
    run_with(planner, items, rehearsal)
}

/// The same for a model of one's own.
fn run_with(
    planner: &mut Planner,
    items: usize,
    rehearsal: impl Fn(Split) -> Rehearsal,
) -> (String, Vec<String>, Admission) {
    let (phase, shape) = (Phase::Training, Shape::of_items(items));
    let mut asked = Vec::new();
    let iterations = planner.to_plan(phase, shape, false).expect("it is not planned yet");
    let rehearse = |split: Split, _: Joining, _: &Recorder| {
        asked.push(split.to_string());
        Ok(rehearsal(split))
    };
    let planned = planner.plan((phase, shape), iterations, Joining::Asked, rehearse);
    let planned = planned.expect("one item fits");
    assert_eq!(planned.cost.rehearsals, asked.len());
    (planned.plan.split().to_string(), asked, planner.begin(phase, shape))
}

#[test]
fn pages_stay_open_where_there_is_room() {
    let mut planner = planner(200);
    assert_eq!(run(&mut planner, 100).0, "1 x 100");
    assert_eq!(run(&mut planner, 60), ("1 x 60".into(), vec!["1 x 60".into()], Admission::Runs));
    assert_eq!(planner.predicted, Bytes::mib(160));
}

#[test]
fn only_training_batches_stay_whole() {
    let mut planner = planner(120).recomputing(RecomputePolicy::default(), false);
    let plan = |planner: &mut Planner, phase| {
        let rehearse = |split: Split, _: Joining, _: &Recorder| Ok(rehearsal(split));
        let key = (phase, Shape::of_items(300));
        let planned = planner.plan(key, Iterations::Two, Joining::Asked, rehearse);
        planned.map(|planned| planned.plan.len())
    };
    assert_eq!(plan(&mut planner, Phase::Training).ok(), Some(3));
    assert!(planner.keep_whole());
    assert!(plan(&mut planner, Phase::Training).is_err(), "nothing can be computed again");
    assert_eq!(plan(&mut planner, Phase::Validation).ok(), Some(3));
    let never = self::planner(120);
    assert!(!never.recomputing(RecomputePolicy::never(), false).keep_whole());
}

#[test]
fn pages_are_given_back_for_fewer_steps() {
    let mut planner = planner(120);
    assert_eq!(run(&mut planner, 100).2, Admission::Runs);
    let (split, _, admission) = run(&mut planner, 60);
    assert_eq!((split.as_str(), admission), ("1 x 60", Admission::RunsOnceGivenBack));
    assert_eq!(planner.predicted, Bytes::mib(100));
    // And back again: its pages were given back for the other shape.
    let first = (Phase::Training, Shape::of_items(100));
    assert_eq!(planner.begin(first.0, first.1), Admission::RunsOnceGivenBack);
    assert_eq!(planner.begin(first.0, first.1), Admission::Runs);
}

#[test]
fn no_second_search_where_fewer_steps_do_not_fit() {
    let mut planner = planner(120);
    run(&mut planner, 10);
    let (split, asked, admission) = run(&mut planner, 300);
    assert_eq!((split.as_str(), admission), ("3 x 100", Admission::Runs));
    assert_eq!(asked.last().map(String::as_str), Some("2 x 150"), "the next fewer, once");
    let (split, needed, _) = run(&mut self::planner(120), 300);
    assert_eq!(split, "3 x 100");
    assert_eq!(asked.len(), needed.len() + 1);
}

#[test]
fn a_failure_in_a_rehearsal_that_may_gain_is_no_reason_to_stop() {
    let mut planner = planner(120);
    run(&mut planner, 10);
    let mut asked = 0;
    // The search needs this split. It is then asked for once more, to see whether it fits without
    // the other batch's pages.
    let rehearse = |split: Split, _: Joining, _: &Recorder| {
        asked += usize::from(split.to_string() == "2 x 150");
        let fails = asked > 1 && split.to_string() == "2 x 150";
        let error = TrainError::EmptyBatch { phase: Phase::Training };
        if fails { Err(error) } else { Ok(rehearsal(split)) }
    };
    let key = (Phase::Training, Shape::of_items(300));
    let planned = planner.plan(key, Iterations::Two, Joining::Asked, rehearse);
    assert_eq!(planned.expect("three steps fit").plan.split().to_string(), "3 x 100");
    assert_eq!(asked, 2);
}

#[test]
fn outputs_are_joined_where_the_same_split_has_room_for_them() {
    // Joined, the outputs of a batch take so many MiB.
    let planned = |items: usize, outputs: usize| {
        let rehearse = |split: Split, joining: Joining, _: &Recorder| {
            let mut one = rehearsal(split);
            if joining == Joining::OfBurn && split.len() > 1 {
                let rows = TensorShape::new([outputs, 1 << 18]);
                let ty = TensorType { shape: rows, dtype: DType::F32 };
                one.trace.tensors.push(TensorInfo::new(ty.into(), Origin::Existing));
            }
            Ok(one)
        };
        let (mut planner, key) = (planner(100), (Phase::Training, Shape::of_items(items)));
        let planned = planner.plan(key, Iterations::Two, Joining::OfBurn, rehearse);
        let planned = planned.expect("it fits");
        (planned.plan.split().to_string(), planned.plan.peak(), planned.joining)
    };
    assert_eq!(planned(100, 15), ("1 x 100".into(), Bytes::mib(100), Joining::OfBurn));
    assert_eq!(planned(240, 15), ("3 x 80".into(), Bytes::mib(100), Joining::OfBurn));
    assert_eq!(planned(240, 30), ("3 x 80".into(), Bytes::mib(80), Joining::NoRoom));
}

#[test]
fn pages_count_of_shapes_that_are_no_longer_rehearsed() {
    let mut planner = planner(205);
    for items in [10, 20, 30, 40, 50] {
        assert_eq!(run(&mut planner, items).2, Admission::Runs);
    }
    assert_eq!(planner.predicted, Bytes::mib(150));
    assert_eq!(planner.ran.len(), REMEMBERED);
    // It fits with the pages of the last four, but not with all.
    let (split, _, admission) = run(&mut planner, 60);
    assert_eq!((split.as_str(), admission), ("1 x 60", Admission::RunsOnceGivenBack));
    assert_eq!(planner.predicted, Bytes::mib(200));
}

#[test]
fn fewer_steps_are_tried_by_the_next_split_and_the_next_of_one_size() {
    let plan_of = |most: usize, cliffs| {
        let fits = |split: Split| {
            let page = if split.largest().get() > most { 100 } else { 1 };
            Ok::<_, TrainError>(Need::exact(Bytes::new(page * split.largest().get() as u64)))
        };
        let options = PlanOptions::new().cliffs(cliffs);
        firebox_plan::plan(Items::new(64), Bytes::new(1_200), &options, fits).expect("one fits")
    };
    let asked = |plan: &Plan, sizing, fitting: &str| {
        let mut asked = Vec::new();
        let gains = may_run_in_fewer_steps(plan, sizing, |split| {
            asked.push(split.to_string());
            asked.last().is_some_and(|split| split == fitting)
        });
        (asked, gains)
    };
    let plan = plan_of(11, Cliffs::Ignore);
    assert_eq!(plan.split().to_string(), "4 x 11 + 2 x 10");
    let both = ["4 x 13 + 1 x 12".to_owned(), "4 x 16".to_owned()];
    assert_eq!(asked(&plan, Sizing::Even, "none"), (both.to_vec(), false));
    assert_eq!(asked(&plan, Sizing::Even, "4 x 16"), (both.to_vec(), true));
    assert_eq!(asked(&plan, Sizing::Even, &both[0]), (both[..1].to_vec(), true));
    assert_eq!(asked(&plan, Sizing::Fixed(Items::new(11)), "1 x 64"), (Vec::new(), false));
    // Eleven items also fit after the others, and need far more than ten.
    let plan = plan_of(10, Cliffs::Avoid);
    assert_eq!(plan.split().to_string(), "1 x 10 + 6 x 9");
    assert_eq!(asked(&plan, Sizing::Even, "none").0, both);
}

#[test]
fn a_share_of_the_budget_is_kept_free_once_more_was_measured() {
    let mut planner = planner(100);
    assert_eq!(run(&mut planner, 100).0, "1 x 100");
    planner.be_cautious(0.9);
    // An existing plan still runs unchanged.
    assert_eq!(planner.begin(Phase::Training, Shape::of_items(100)), Admission::Runs);
    let mut planner = self::planner(100);
    planner.be_cautious(0.9);
    assert_eq!(run(&mut planner, 100).0, "2 x 50");
}

#[test]
fn other_shapes_are_planned_where_what_is_open_is_more_than_may_be_used_now() {
    let mut planner = planner(100);
    assert_eq!(run(&mut planner, 100).0, "1 x 100");
    planner.be_cautious(0.9);
    let (split, _, admission) = run(&mut planner, 60);
    assert_eq!((split.as_str(), admission), ("1 x 60", Admission::RunsOnceGivenBack));
}

#[test]
fn other_shapes_are_planned_for_one_iteration_until_two_come_in_a_row() {
    let mut planner = planner(200);
    let (first, other) = (Shape::of_items(100), Shape::of_items(60));
    assert_eq!(planner.to_plan(Phase::Training, first, false), Some(Iterations::Two));
    run(&mut planner, 100);
    assert_eq!(planner.to_plan(Phase::Training, first, true), None);
    assert_eq!(planner.to_plan(Phase::Training, other, false), Some(Iterations::One));
    run(&mut planner, 60);
    assert_eq!(planner.to_plan(Phase::Training, other, false), None);
    assert_eq!(planner.to_plan(Phase::Training, other, true), Some(Iterations::Two));
    assert_eq!(planner.to_plan(Phase::Validation, other, false), Some(Iterations::Two));
}

#[test]
fn a_batch_is_planned_again_once_kernels_are_tuned() {
    let pool = Arc::new(Pool { untuned: AtomicUsize::new(1) });
    let mut planner = Planner::new(pool.clone(), Bytes::mib(100), Sizing::Even, None);
    let (phase, shape) = (Phase::Training, Shape::of_items(100));
    assert_eq!(run(&mut planner, 100).0, "2 x 50", "the dearest kernels count");
    assert_eq!(planner.to_plan(phase, shape, true), None, "nothing has run yet");
    planner.has_run(Phase::Validation);
    assert_eq!(planner.to_plan(phase, shape, true), None, "only validation has");
    planner.has_run(phase);
    assert_eq!(planner.to_plan(phase, shape, true), None, "fusion has not settled");
    planner.begin(phase, shape);
    planner.has_run(phase);
    assert_eq!(planner.to_plan(phase, shape, true), Some(Iterations::Two));
    pool.untuned.store(0, Ordering::Relaxed);
    let (split, _, admission) = run(&mut planner, 100);
    assert_eq!((split.as_str(), admission), ("1 x 100", Admission::RunsOnceGivenBack));
    planner.has_run(phase);
    assert_eq!(planner.to_plan(phase, shape, true), None, "all is chosen");
}

#[test]
fn what_is_never_tuned_is_not_planned_for_ever() {
    let pool = Arc::new(Pool { untuned: AtomicUsize::new(1) });
    let mut planner = Planner::new(pool, Bytes::mib(100), Sizing::Even, None);
    let (phase, shape) = (Phase::Training, Shape::of_items(100));
    for round in 0..2 {
        assert_eq!(run(&mut planner, 100).0, "2 x 50", "round {round}");
        planner.has_run(phase);
        planner.begin(phase, shape);
        planner.has_run(phase);
    }
    assert_eq!(planner.to_plan(phase, shape, true), None);
}

#[test]
fn what_is_chosen_stays_open_when_others_are_planned_again() {
    let pool = Arc::new(Pool { untuned: AtomicUsize::new(1) });
    let mut planner = Planner::new(pool.clone(), Bytes::mib(200), Sizing::Even, None);
    let (first, other) = (Shape::of_items(60), Shape::of_items(40));
    let phase = Phase::Training;
    // Both have tuned for two batches, and the first is planned again.
    for shape in [first, other] {
        run(&mut planner, shape.items);
        planner.has_run(phase);
        planner.begin(phase, shape);
        planner.has_run(phase);
    }
    pool.untuned.store(0, Ordering::Relaxed);
    assert_eq!(run(&mut planner, 60).2, Admission::RunsOnceGivenBack);
    // So is the other, after it: the pages that it opened for tuning are given back.
    let (split, _, admission) = run(&mut planner, 40);
    assert_eq!((split.as_str(), admission), ("1 x 40", Admission::RunsOnceGivenBack));
    for shape in [first, other, first] {
        assert_eq!(planner.to_plan(phase, shape, false), None);
        assert_eq!(planner.begin(phase, shape), Admission::Runs);
    }
    assert_eq!(planner.ran.len(), 2);
}

#[test]
fn a_second_run_rehearses_the_whole_batch_and_its_split() {
    let folder = tempfile::tempdir().unwrap();
    let remembering = |budget| planner(budget).remembering(Some(Cache::new(folder.path())));
    let (split, first, _) = run(&mut remembering(100), 930);
    assert!(first.len() > 2, "{first:?}");
    for round in 0..2 {
        let (again, asked, _) = run(&mut remembering(100), 930);
        assert_eq!((&again, asked), (&split, vec!["1 x 930".into(), split.clone()]), "{round}");
    }
    let new = |budget| run(&mut planner(budget), 930);
    assert_eq!(run(&mut remembering(110), 930), new(110), "another budget is another search");
    let (whole, asked, _) = run(&mut remembering(2000), 930);
    assert_eq!((whole, asked.len()), ("1 x 930".into(), 1));
}

#[test]
fn a_split_that_needs_something_else_is_searched_anew() {
    let folder = tempfile::tempdir().unwrap();
    let remembering = || planner(100).remembering(Some(Cache::new(folder.path())));
    run(&mut remembering(), 930);
    // Of the whole batch, the recording is the same.
    let grown = |split: Split| {
        let mut grown = rehearsal(split);
        let tensor = grown.trace.tensors[0].clone();
        grown.trace.tensors.extend((split.len() > 1).then_some(tensor));
        grown
    };
    let (expected, ..) = run_with(&mut planner(100), 930, grown);
    let (split, asked, _) = run_with(&mut remembering(), 930, grown);
    assert_eq!(split, expected);
    assert!(asked.len() > 3, "{asked:?}");
    let (again, asked, _) = run_with(&mut remembering(), 930, grown);
    assert_eq!((again, asked), (split.clone(), vec!["1 x 930".into(), split]));
}

#[test]
fn other_choices_of_the_tuner_are_another_search() {
    let folder = tempfile::tempdir().unwrap();
    let run = |untuned| {
        let pool = Arc::new(Pool { untuned: AtomicUsize::new(untuned) });
        let planner = Planner::new(pool, Bytes::mib(100), Sizing::Even, None);
        run(&mut planner.remembering(Some(Cache::new(folder.path()))), 100).0
    };
    assert_eq!([run(1), run(0), run(1)], ["2 x 50", "1 x 100", "2 x 50"]);
}
