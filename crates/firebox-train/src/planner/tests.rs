//! Tests of plans on a memory model that is fully known: each trace has one tensor, and one page
//! for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Shape as TensorShape};
use firebox_heap::Heap;
use firebox_lazy::{Rehearsal, StepRecorder};
use firebox_plan::Split;
use firebox_trace::{Category, Footprint, Origin, Paging, Question, TensorType, Trace};

use super::*;

/// Page sizes are multiples of this many MiB.
const PAGE: u64 = 10;

/// One page for all tensors of a trace.
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

    fn footprint_of(trace: &Trace) -> Footprint {
        let reserved = Self::page(trace);
        let mut footprint = Heap::simple().footprint(trace);
        footprint.categories.add(Category::Temporary, reserved - footprint.peak);
        footprint.peak = reserved;
        // An allocator that asks for pages one by one would be counted with one more.
        let pages = BTreeMap::new();
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
        let mut footprint = Self::footprint_of(question.trace);
        let tunes = self.untuned.load(Ordering::Relaxed) > 0;
        if let Some(paging) = footprint.paging.as_mut().filter(|_| tunes) {
            paging.tunes = true;
            footprint.categories.add(Category::Temporary, footprint.peak);
            footprint.peak = footprint.peak * 2;
        }
        footprint
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
    Planner::new(Arc::new(Pool::default()), Bytes::mib(budget), Sizing::Even)
}

/// Plans batches of `items` items. Returns the plan, the splits that were rehearsed for it, and
/// what must be done first.
fn run(planner: &mut Planner, items: usize) -> (String, Vec<String>, Admission) {
    let (phase, shape) = (Phase::Training, Shape::of_items(items));
    let mut asked = Vec::new();
    let (iterations, _) = planner.to_plan(phase, shape, false).expect("it is not planned yet");
    let rehearse = |split: Split, _: Joining, _: &StepRecorder| {
        asked.push(split.to_string());
        Ok(rehearsal(split))
    };
    let planned = planner.plan((phase, shape), iterations, Joining::Asked, rehearse);
    let planned = planned.expect("one item fits");
    assert_eq!(planned.cost.rehearsals, asked.len());
    (planned.plan.split().to_string(), asked, planner.begin(phase, shape))
}

#[test]
fn pages_of_another_shape_are_given_back() {
    let mut planner = planner(200);
    assert_eq!(run(&mut planner, 100).2, Admission::RunsOnceGivenBack, "of planning");
    let first = (Phase::Training, Shape::of_items(100));
    assert_eq!(planner.begin(first.0, first.1), Admission::Runs);
    let (split, asked, admission) = run(&mut planner, 60);
    assert_eq!((split.as_str(), admission), ("1 x 60", Admission::RunsOnceGivenBack));
    assert_eq!(asked, ["1 x 60"]);
    assert_eq!(planner.predicted(), Bytes::mib(100));
    assert_eq!(planner.begin(first.0, first.1), Admission::RunsOnceGivenBack);
    assert_eq!(planner.begin(first.0, first.1), Admission::Runs);
}

#[test]
fn only_training_batches_stay_whole() {
    let mut planner = planner(120).recomputing(RecomputePolicy::default(), false);
    let plan = |planner: &mut Planner, phase| {
        let rehearse = |split: Split, _: Joining, _: &StepRecorder| Ok(rehearsal(split));
        let key = (phase, Shape::of_items(300));
        let planned = planner.plan(key, Iterations::Two, Joining::Asked, rehearse);
        planned.map(|planned| planned.plan.len())
    };
    assert_eq!(plan(&mut planner, Phase::Training).ok(), Some(3));
    assert!(planner.keep_whole());
    assert!(plan(&mut planner, Phase::Training).is_err(), "nothing can be recomputed");
    assert_eq!(plan(&mut planner, Phase::Validation).ok(), Some(3));
    let never = self::planner(120);
    assert!(!never.recomputing(RecomputePolicy::never(), false).keep_whole());
}

#[test]
fn outputs_are_joined_where_the_same_split_has_room_for_them() {
    // Joined, the outputs of a batch take so many MiB.
    let planned = |items: usize, outputs: usize| {
        let rehearse = |split: Split, joining: Joining, _: &StepRecorder| {
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
fn other_shapes_are_planned_for_one_iteration_until_two_come_in_a_row() {
    let mut planner = planner(200);
    let (first, other) = (Shape::of_items(100), Shape::of_items(60));
    assert_eq!(planner.to_plan(Phase::Training, first, false), Some((Iterations::Two, None)));
    run(&mut planner, 100);
    assert_eq!(planner.to_plan(Phase::Training, first, true), None);
    assert_eq!(planner.to_plan(Phase::Training, other, false), Some((Iterations::One, None)));
    run(&mut planner, 60);
    assert_eq!(planner.to_plan(Phase::Training, other, false), None);
    assert_eq!(planner.to_plan(Phase::Training, other, true), Some((Iterations::Two, None)));
    assert_eq!(planner.to_plan(Phase::Validation, other, false), Some((Iterations::Two, None)));
}

#[test]
fn a_batch_is_planned_again_once_kernels_are_tuned() {
    let pool = Arc::new(Pool { untuned: AtomicUsize::new(1) });
    let mut planner = Planner::new(pool.clone(), Bytes::mib(100), Sizing::Even);
    let (phase, shape) = (Phase::Training, Shape::of_items(100));
    assert_eq!(run(&mut planner, 100).0, "2 x 50", "the dearest kernels count");
    assert_eq!(planner.to_plan(phase, shape, true), None, "nothing has run yet");
    planner.has_run(Phase::Validation);
    assert_eq!(planner.to_plan(phase, shape, true), None, "only validation has");
    planner.has_run(phase);
    assert_eq!(planner.to_plan(phase, shape, true), None, "fusion has not settled");
    planner.begin(phase, shape);
    planner.has_run(phase);
    assert_eq!(
        planner.to_plan(phase, shape, true),
        Some((Iterations::Two, Some(Replanned::Tuned)))
    );
    pool.untuned.store(0, Ordering::Relaxed);
    let (split, _, admission) = run(&mut planner, 100);
    assert_eq!((split.as_str(), admission), ("1 x 100", Admission::RunsOnceGivenBack));
    planner.has_run(phase);
    assert_eq!(planner.to_plan(phase, shape, true), None, "all is chosen");
}

#[test]
fn what_is_never_tuned_is_not_planned_for_ever() {
    let pool = Arc::new(Pool { untuned: AtomicUsize::new(1) });
    let mut planner = Planner::new(pool, Bytes::mib(100), Sizing::Even);
    let (phase, shape) = (Phase::Training, Shape::of_items(100));
    for round in 0..2 {
        assert_eq!(run(&mut planner, 100).0, "2 x 50", "round {round}");
        planner.has_run(phase);
        planner.begin(phase, shape);
        planner.has_run(phase);
    }
    assert_eq!(planner.to_plan(phase, shape, true), None);
}
