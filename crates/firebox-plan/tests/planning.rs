//! What the planner decides, case by case: one line of footprint, one line of expected plan.
//!
//! Footprints are in whole MiB: `fixed` for the model, `item` for each item, `sum` for the
//! gradients held while there are several micro-batches. Irregular footprints are given as
//! functions.

mod checker;

use std::convert::Infallible;

use firebox_plan::{
    Accumulating, Need, Plan, PlanError, PlanOptions, Probing, Role, Sizing, Split, plan,
    plan_at_once,
};
use firebox_trace::{Bytes, Items};

use crate::checker::judged;

const EVEN: PlanOptions = options(Sizing::Even, Probing::FromWhole);
const FROM_ONE: PlanOptions = options(Sizing::Even, Probing::FromOne);
const POWERS: PlanOptions = options(Sizing::PowersOfTwo, Probing::FromWhole);
const POWERS_FROM_ONE: PlanOptions = options(Sizing::PowersOfTwo, Probing::FromOne);

const fn options(sizing: Sizing, probing: Probing) -> PlanOptions {
    PlanOptions::new().sizing(sizing).probing(probing)
}

const WHOLE: PlanOptions = options(Sizing::Whole, Probing::FromWhole);

const fn fixed(size: usize) -> PlanOptions {
    options(Sizing::Fixed(Items::new(size)), Probing::FromWhole)
}

const fn fixed_from_one(size: usize) -> PlanOptions {
    options(Sizing::Fixed(Items::new(size)), Probing::FromOne)
}

/// A footprint in MiB that grows linearly with the items.
fn affine(fixed: u64, item: u64, sum: u64) -> impl Fn(usize, Accumulating) -> u64 {
    move |items, accumulating| {
        fixed + item * items as u64 + if accumulating == Accumulating::Yes { sum } else { 0 }
    }
}

/// A footprint of one MiB for each item, except for the given sizes.
fn uneven(exceptions: &'static [(usize, u64)]) -> impl Fn(usize, Accumulating) -> u64 {
    move |items, _| {
        let exception = exceptions.iter().find(|(size, _)| *size == items);
        exception.map_or(items as u64, |(_, mib)| *mib)
    }
}

fn run(
    batch: usize,
    budget: u64,
    options: PlanOptions,
    mib: impl Fn(usize, Accumulating) -> u64,
) -> Result<Plan, PlanError<Infallible>> {
    let plan = plan(Items::new(batch), Bytes::mib(budget), &options, |split| {
        let peaks = split.sizes().map(|size| mib(size.get(), split.accumulating()));
        Ok(Need::exact(Bytes::mib(peaks.max().expect("there is a micro-batch"))))
    });
    plan.map(|plan| judged(plan, options.sizing))
}

/// Plans `batch` for `budget` MiB and compares the text of the plan or of the error.
#[track_caller]
fn check(
    batch: usize,
    budget: u64,
    options: PlanOptions,
    mib: impl Fn(usize, Accumulating) -> u64,
    expected: &str,
) {
    let found = run(batch, budget, options, mib);
    assert_eq!(found.map_or_else(|error| error.to_string(), |plan| plan.to_string()), expected);
}

/// The error text for a batch that is split and whose holdings are unknown.
fn one_item_needs(peak: u64, excess: u64, budget: u64) -> String {
    format!(
        "one item needs {peak}.00 MiB with the gradients of the batch held, {excess}.00 MiB more than the budget of \
         {budget}.00 MiB: raise the budget, make each item smaller, or take a smaller model"
    )
}

/// Compares the questions in the order asked. `+` marks sizes asked for as one of several.
#[track_caller]
fn check_questions(
    batch: usize,
    budget: u64,
    options: PlanOptions,
    mib: impl Fn(usize, Accumulating) -> u64,
    expected: &str,
) {
    let plan = run(batch, budget, options, mib).expect("there is a plan");
    let asked = plan.asked().iter().map(|answer| match answer.split.accumulating() {
        Accumulating::No => answer.split.largest().to_string(),
        Accumulating::Yes => format!("{}+", answer.split.largest()),
    });
    assert_eq!(asked.collect::<Vec<_>>().join(" "), expected);
}

#[test]
fn even_sizes_in_the_fewest_steps() {
    check(100, 100, EVEN, affine(0, 1, 0), "100 = 1 x 100");
    check(100, 99, EVEN, affine(0, 1, 0), "100 = 2 x 50");
    check(100, 50, EVEN, affine(0, 1, 0), "100 = 2 x 50");
    check(100, 49, EVEN, affine(0, 1, 0), "100 = 1 x 34 + 2 x 33");
    check(100, 30, EVEN, affine(0, 1, 0), "100 = 4 x 25");
    check(100, 7, EVEN, affine(0, 1, 0), "100 = 10 x 7 + 5 x 6");
    check(100, 1, EVEN, affine(0, 1, 0), "100 = 100 x 1");
    check(10, 4, EVEN, affine(0, 1, 0), "10 = 1 x 4 + 2 x 3");
    check(101, 100, EVEN, affine(0, 1, 0), "101 = 1 x 51 + 1 x 50");
    check(1, 1, EVEN, affine(0, 1, 0), "1 = 1 x 1");
    check(2, 1, EVEN, affine(0, 1, 0), "2 = 2 x 1");
    check(512, 8192, EVEN, affine(512, 96, 64), "512 = 1 x 74 + 6 x 73");
}

#[test]
fn the_gradient_sum_counts_only_when_the_batch_is_split() {
    check(8, 18, EVEN, affine(10, 1, 10), "8 = 1 x 8");
    check(8, 18, FROM_ONE, affine(10, 1, 10), "8 = 1 x 8");
    check(9, 24, EVEN, affine(10, 2, 5), "9 = 3 x 3");
}

#[test]
fn powers_of_two_with_the_remainder_last() {
    for options in [POWERS, POWERS_FROM_ONE] {
        check(100, 100, options, affine(0, 1, 0), "100 = 1 x 100");
        check(100, 99, options, affine(0, 1, 0), "100 = 1 x 64 + 1 x 36");
        check(100, 63, options, affine(0, 1, 0), "100 = 3 x 32 + 1 x 4");
        check(64, 63, options, affine(0, 1, 0), "64 = 2 x 32");
        check(65, 64, options, affine(0, 1, 0), "65 = 1 x 64 + 1 x 1");
        check(7, 1, options, affine(0, 1, 0), "7 = 7 x 1");
        check(1, 1, options, affine(0, 1, 0), "1 = 1 x 1");
    }
}

#[test]
fn a_fixed_size_is_verified_and_kept() {
    for options in [fixed(32), fixed_from_one(32)] {
        check(100, 200, options, affine(0, 1, 0), "100 = 3 x 32 + 1 x 4");
        check(64, 32, options, affine(0, 1, 0), "64 = 2 x 32");
        check(32, 32, options, affine(0, 1, 9), "32 = 1 x 32");
        check(20, 20, options, affine(0, 1, 9), "20 = 1 x 20");
    }
}

#[test]
fn a_fixed_size_that_does_not_fit() {
    check(
        100,
        20,
        fixed(50),
        affine(0, 1, 0),
        "a micro-batch of 50 items does not fit: it needs 50.00 MiB with the gradients of the batch held, 30.00 MiB \
         more than the budget of 20.00 MiB; leave the size out to have it found, or set it to 16, which fits",
    );
    check(
        100,
        20,
        fixed_from_one(80),
        affine(0, 1, 0),
        "a micro-batch of 80 items does not fit: already 32 items need 32.00 MiB with the gradients of the batch \
         held, 12.00 MiB more than the budget of 20.00 MiB; leave the size out to have it found, or set it to 16, \
         which fits",
    );
    // The batch fits in one piece without a gradient sum. With one, only smaller pieces fit.
    check(
        10,
        9,
        fixed(12),
        affine(0, 1, 4),
        "a micro-batch of 10 items does not fit: it needs 10.00 MiB, 1.00 MiB more than the budget of 9.00 MiB; \
         leave the size out to have it found, or set it to 4, which fits",
    );
    // The remainder of four items is what does not fit, so the search ends at a size below four.
    check(
        100,
        40,
        fixed(32),
        uneven(&[(4, 41)]),
        "a micro-batch of 32 items does not fit: it needs 41.00 MiB with the gradients of the batch held, 1.00 MiB \
         more than the budget of 40.00 MiB; leave the size out to have it found, or set it to 2, which fits",
    );
}

#[test]
fn a_fixed_size_where_not_even_one_item_fits() {
    let error = one_item_needs(30, 10, 20);
    check(100, 20, fixed(50), affine(29, 1, 0), &error);
    check(100, 20, fixed(1), affine(29, 1, 0), &error);
    check(100, 20, fixed_from_one(50), affine(29, 1, 0), &error);
    // One item would fit as a batch of its own. This batch has two items.
    let error = one_item_needs(30, 1, 29);
    check(2, 29, fixed(2), affine(28, 1, 1), &error);
}

#[test]
fn a_whole_batch_is_not_split() {
    check(100, 100, WHOLE, affine(0, 1, 9), "100 = 1 x 100");
    let error = "a batch of 100 items does not fit, and is not split: it needs 100.00 MiB, 1.00 MiB more than the \
                 budget of 99.00 MiB";
    check(100, 99, WHOLE, affine(0, 1, 9), error);
    check_questions(100, 100, WHOLE, affine(0, 1, 0), "100");
    let from_one = options(Sizing::Whole, Probing::FromOne);
    let error = "a batch of 100 items does not fit, and is not split: already 32 items need 32.00 MiB, 12.00 \
                 MiB more than the budget of 20.00 MiB";
    check(100, 20, from_one, affine(0, 1, 0), error);
    let error = "one item needs 30.00 MiB, 10.00 MiB more than the budget of 20.00 MiB: raise the budget, make each \
                 item smaller, or take a smaller model";
    check(100, 20, from_one, affine(29, 1, 0), error);
    check(1, 20, WHOLE, |_, _| 30, error);
}

#[test]
fn questions_without_an_answer() {
    check(
        0,
        1,
        EVEN,
        affine(0, 1, 0),
        "the batch has no items: leave it out, or look for the reason in the data loader",
    );
    check(
        1,
        0,
        EVEN,
        affine(0, 0, 0),
        "the budget is zero bytes: give one that holds the model, its optimizer state and one item",
    );
    check(
        1,
        1,
        fixed(0),
        affine(0, 1, 0),
        "the fixed micro-batch size is zero items: give one or more, or leave the size out to have it found",
    );
    let error = plan(Items::new(8), Bytes::mib(1), &EVEN, |_| Err("the recording ended early"));
    assert_eq!(
        error.unwrap_err().to_string(),
        "cannot plan without the footprint of 8 items: the recording ended early"
    );
}

#[test]
fn one_item_that_does_not_fit_names_who_holds_the_most() {
    #[track_caller]
    fn check(batch: usize, state: u64, activations: u64, inputs: u64, expected: &str) {
        let budget = Bytes::mib(100);
        let found = plan(Items::new(batch), budget, &EVEN, |split| {
            let activations = Bytes::mib(activations) * split.largest().get() as u64;
            let (state, inputs) = (Bytes::mib(state), Bytes::mib(inputs));
            Ok::<_, Infallible>(
                Need::heuristic(state + activations + inputs)
                    .holding("the optimizer state", Role::State, state)
                    .holding("activations of `encoder`", Role::Activations, activations)
                    .holding("the images", Role::Inputs, inputs),
            )
        });
        let Err(PlanError::DoesNotFit(error)) = found else { panic!("unexpected: {found:?}") };
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.budget, budget);
        assert_eq!(error.missing(), error.need.peak - budget);
    }
    check(
        1,
        90,
        50,
        10,
        "one item needs about 150.00 MiB, 50.00 MiB more than the budget of 100.00 MiB, and the largest part is the \
         optimizer state with 90.00 MiB: take a smaller model, an optimizer with less state, or a card with more \
         memory (up to 90.00 MiB less); or make each item smaller, such as shorter sequences or smaller images (up to \
         50.00 MiB less)",
    );
    check(
        64,
        10,
        110,
        0,
        "one item needs about 120.00 MiB with the gradients of the batch held, 20.00 MiB more than the budget of \
         100.00 MiB, and the largest part is activations of `encoder` with 110.00 MiB: make each item smaller, \
         such as shorter sequences or smaller images (up to 110.00 MiB less); or take a smaller model, an optimizer with less state, or a card with more memory (up to 10.00 MiB less)",
    );
    check(
        64,
        1,
        1,
        100,
        "one item needs about 102.00 MiB with the gradients of the batch held, 2.00 MiB more than the budget of \
         100.00 MiB, and the largest part is the images with 100.00 MiB: set a smaller batch size in the data \
         loader (up to 100.00 MiB less); or take a smaller model, an optimizer with less state, or a card with more \
         memory (up to 1.00 MiB less)",
    );
}

#[test]
fn few_questions_from_the_whole_downwards() {
    check_questions(100, 100, EVEN, affine(0, 1, 0), "100");
    check_questions(100, 50, EVEN, affine(0, 1, 0), "100 9+ 17+ 25+ 34+ 50+");
    check_questions(100, 30, EVEN, affine(0, 1, 0), "100 9+ 17+ 25+ 34+");
    check_questions(5000, 70, EVEN, affine(0, 1, 0), "5000 70+ 136+ 91+ 79+ 74+ 72+ 71+");
    check_questions(100, 40, POWERS, affine(0, 1, 0), "100 8+ 32+ 64+");
    check_questions(100, 40, fixed(32), affine(0, 1, 0), "32+");
}

#[test]
fn from_one_item_upwards_no_question_is_more_than_twice_what_fits() {
    check_questions(100, 100, FROM_ONE, affine(0, 1, 0), "1 2 4 8 15 25 50 100");
    check_questions(100, 30, FROM_ONE, affine(0, 1, 0), "1 2 4 8 15 25 50 9+ 15+ 20+ 25+ 34+");
    check_questions(1, 1, FROM_ONE, affine(0, 1, 0), "1");
    check_questions(100, 40, POWERS_FROM_ONE, affine(0, 1, 0), "1 2 4 8 16 32 64 4+ 16+ 32+");
    check_questions(100, 40, fixed_from_one(32), affine(0, 1, 0), "1+ 2+ 4+ 8+ 16+ 32+");
}

#[test]
fn guesses_learn_from_misfits() {
    // The gradient sum takes 140 MiB that the first guess ignores. An uneven split with a size
    // above 12 opens a page of 400 MiB.
    let peak = |split: &Split| {
        let items = split.largest().get() as u64;
        let opens = items > 12 && split.sizes().any(|size| size != split.largest());
        10 + 42 * items + if split.len() > 1 { 140 } else { 0 } + if opens { 400 } else { 0 }
    };
    let mut asked = Vec::new();
    let plan = plan_at_once(Items::new(64), Bytes::mib(815), &EVEN.at_once(4), |splits| {
        asked.push(splits.iter().map(|split| split.largest().get()).collect::<Vec<_>>());
        let need = |split| {
            let state = Bytes::mib(10);
            Ok::<_, Infallible>(Need::exact(Bytes::mib(peak(split))).holding(
                "state",
                Role::State,
                state,
            ))
        };
        splits.iter().map(need).collect()
    });
    // If 13 items, which need more than 16, were the only basis, the next guess would be 8.
    let plan = judged(plan.expect("one item fits"), Sizing::Even);
    assert_eq!(plan.to_string(), "64 = 4 x 11 + 2 x 10");
    assert_eq!(asked, [vec![64], vec![16, 13], vec![11, 10]]);
}

#[test]
fn a_size_out_of_line_is_walked_around() {
    // 33 items, the smaller size of three pieces, do not fit. Four pieces do.
    check(100, 40, EVEN, uneven(&[(33, 41)]), "100 = 4 x 25");
    // No neighbouring size fits; a size farther down the ladder does.
    check(
        100,
        40,
        EVEN,
        uneven(&[(33, 41), (25, 41), (20, 41), (16, 41), (14, 41)]),
        "100 = 4 x 13 + 4 x 12",
    );
    // One item does not fit, two items do.
    check(100, 2, EVEN, uneven(&[(1, 3)]), "100 = 50 x 2");
    // Five items cannot be cut into pairs: one item always remains.
    let error = one_item_needs(3, 1, 2);
    check(5, 2, EVEN, uneven(&[(1, 3)]), &error);
    // One item does not fit, but the next larger sizes do. The search has not tried those yet.
    check(100, 40, EVEN, |items, _| if items == 4 { 40 } else { 41 }, "100 = 25 x 4");
}

#[test]
fn a_plan_tells_what_it_knows() {
    let plan = run(100, 47, EVEN, affine(10, 1, 3)).expect("there is a plan");
    assert_eq!(plan.to_string(), "100 = 1 x 34 + 2 x 33");
    assert_eq!(plan.peak(), Bytes::mib(47));
    assert_eq!(plan.budget(), Bytes::mib(47));
    assert_eq!(plan.batch(), Items::new(100));
    assert_eq!(plan.largest(), Items::new(34));
    assert_eq!(plan.accumulating(), Accumulating::Yes);
    assert_eq!(plan.sizes().len(), 3);
    assert_eq!(plan.ranges().last(), Some(67..100));
}
