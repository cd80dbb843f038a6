//! Tests budgets against what the driver gave out.
//!
//! The measured bytes include planning. Other tensors of the program do not count.

use firebox::Bytes;
use firebox_blank::{Completions, Fault};
use firebox_testing::machine::device;
use libtest_mimic::{Failed, Trial};

use crate::child::{Job, Pools};
use crate::trial::{CARD, Kernels, LIMIT, Left, card, ensure, only, run, run_with, test};

/// Memory that the program keeps alongside training.
const KEPT: Bytes = Bytes::mib(240);

/// Model, batch size, and a budget that forces a split.
const TIGHT: [(&str, usize, Bytes); 3] = [
    ("reader", 6000, Bytes::mib(150)),
    ("cnn", 400, Bytes::mib(200)),
    ("gpt", 200, Bytes::mib(150)),
];

/// Trains within a budget that forces a split, with nothing tuned yet. The driver never gives out
/// more, not even during planning.
fn within(pools: Pools, model: &'static str, items: usize, memory: Bytes) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let job =
        Job { pools, memory: Some(memory), ..Job::new(model, items, kernels.path().to_owned()) };
    let left = run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?;
    let ended = left.fitted()?;
    let plan = ended.plan.clone().unwrap_or_default();
    ensure(plan != format!("{items} = 1 x {items}"), || {
        left.complaint(&format!("it was not split: {plan}"))
    })?;
    let peak = left.peak();
    ensure(peak <= memory, || {
        left.complaint(&format!("the driver gave {peak} of {memory}, for {plan}"))
    })?;
    println!("{model}: {plan}, the driver gave {peak} of {memory}");
    Ok(())
}

/// A busy device: events and frees take effect half a millisecond later.
const LATE: Completions = Completions::Late { microseconds: 500 };

/// Allowed range of predicted over peak bytes at the driver on burn's pools. A page more is counted
/// than is certainly needed, which is a fifth of what small models take.
const ACCURACY: std::ops::RangeInclusive<f64> = 0.99..=1.25;

/// Checks a run on a machine that refuses nothing.
///
/// The driver must be used correctly, and its books must agree with the allocator's and with the
/// prediction. An earlier child has tuned the kernels.
fn counts(pools: Pools, name: &'static str, completions: Completions) -> Result<(), Failed> {
    let machine = only(name).with_completions(completions);
    let warm = Kernels::of("mlp", 600)?;
    let folder = tempfile::tempdir()?;
    let is_warm = name == CARD;
    let kernels = if is_warm { warm.path() } else { folder.path().to_owned() };
    let job = Job { pools, validates: true, ..Job::new("mlp", 600, kernels) };
    if !is_warm {
        run_with(&machine, &job, LIMIT * 4, |_, _| ())?.fitted()?;
    }
    let left = run_with(&machine, &job, LIMIT * 2, |_, _| ())?;
    let ended = left.fitted()?;
    let books = left.books.as_ref().ok_or("the child kept no books")?;
    let device = books.device(0);
    ensure(device.misuses() == 0, || left.complaint("the driver was misused"))?;
    ensure(device.launches() > 0 && device.refused() == 0, || {
        left.complaint("nothing was launched")
    })?;
    let measured = ended.measured.ok_or("nothing was measured")?;
    // The allocator's count and the driver's agree, except for buffers of zero bytes.
    let difference = left.peak().max(measured) - left.peak().min(measured);
    ensure(difference < Bytes::kib(64), || {
        left.complaint(&format!("the driver gave {}, the allocator has {measured}", left.peak()))
    })?;
    let ratio = ended.predicted.unwrap_or_default().ratio(left.peak());
    println!("{name}: predicted {ratio:.3} of the {} that the driver gave", left.peak());
    let accuracy = match pools {
        Pools::Burns => ACCURACY,
        Pools::Ours => 1.0..=1.0,
    };
    ensure(accuracy.contains(&ratio), || left.complaint(&format!("{ratio:.3} was predicted")))
}

/// A batch that must stay whole computes tensors again where it would not fit. The driver gives out
/// what was predicted.
fn computes_again(pools: Pools, model: &'static str, items: usize) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let folder = kernels.path().to_owned();
    let job =
        Job { pools, micro_batch: Some(items), recompute: true, ..Job::new(model, items, folder) };
    // Until all kernels are chosen, more is counted.
    run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?.fitted()?;
    let whole = run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?;
    let whole = whole.fitted()?.predicted.ok_or("nothing was predicted")?;
    for share in [0.85, 0.75] {
        let memory = whole.scale(share);
        let job = Job { memory: Some(memory), ..job.clone() };
        let left = run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?;
        let ended = left.fitted()?;
        let again = ended.again.unwrap_or_default();
        ensure(again > 0, || left.complaint("nothing was recomputed"))?;
        let predicted = ended.predicted.unwrap_or_default();
        let ratio = predicted.ratio(left.peak());
        println!("{model}: {again} again, predicted {ratio:.4} of {} of {memory}", left.peak());
        let accuracy = match pools {
            Pools::Burns => ACCURACY,
            Pools::Ours => 1.0..=1.0,
        };
        ensure(accuracy.contains(&ratio) && left.peak() <= memory, || {
            left.complaint(&format!("{predicted} was predicted within {memory}"))
        })?;
    }
    Ok(())
}

/// With the optimizer's state in host memory less is predicted, and the driver gives out what was
/// predicted.
fn parks(pools: Pools, model: &'static str, items: usize) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let folder = kernels.path().to_owned();
    let job = Job {
        pools,
        micro_batch: Some(items / 4),
        validates: true,
        ..Job::new(model, items, folder)
    };
    // Until all kernels are chosen, more is counted.
    run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?.fitted()?;
    let usual = run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?;
    let parked = run_with(&only(CARD), &Job { parks: true, ..job }, LIMIT * 6, |_, _| ())?;
    let of = |left: &Left| left.fitted()?.predicted.ok_or(Failed::from("nothing was predicted"));
    let (before, predicted) = (of(&usual)?, of(&parked)?);
    let ratio = predicted.ratio(parked.peak());
    println!("{model}: predicted {ratio:.4} of {}, {before} on the device", parked.peak());
    let accuracy = match pools {
        Pools::Burns => ACCURACY,
        Pools::Ours => 1.0..=1.0,
    };
    ensure(accuracy.contains(&ratio) && parked.peak() < usual.peak(), || {
        let was = usual.peak();
        parked.complaint(&format!("{predicted} was predicted, {was} were taken before"))
    })
}

/// Of a batch in parts, whose outputs are joined if they are not too many, the driver gives out
/// what was predicted.
fn joins(model: &'static str, items: usize, parts: usize) -> Result<(), Failed> {
    let pools = Pools::Ours;
    let kernels = tempfile::tempdir()?;
    let micro_batch = Some(items.div_ceil(parts));
    let job = Job {
        pools,
        micro_batch,
        validates: true,
        ..Job::new(model, items, kernels.path().into())
    };
    // Until all kernels are chosen, more is counted.
    run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?.fitted()?;
    let left = run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?;
    let ended = left.fitted()?;
    let plan = ended.plan.clone().unwrap_or_default();
    let ratio = ended.predicted.unwrap_or_default().ratio(left.peak());
    println!("{model}: {plan}, predicted {ratio:.4} of {}", left.peak());
    ensure((0.9999..1.0001).contains(&ratio), || left.complaint(&format!("{ratio:.4} for {plan}")))
}

/// firebox's pool launches the same number of kernels as burn's pools, once kernels are chosen.
fn launches() -> Result<(), Failed> {
    let launches_on = |pools| {
        let kernels = Kernels::of("mlp", 600)?;
        let job = Job { pools, workers: 0, ..Job::new("mlp", 600, kernels.path()) };
        // The first run tunes what no earlier run has chosen.
        run(&only(CARD), &job)?.fitted()?;
        let left = run(&only(CARD), &job)?;
        left.fitted()?;
        let books = left.books.ok_or("the child kept no books")?;
        Ok::<_, Failed>(books.device(0).launches())
    };
    let (burns, ours) = (launches_on(Pools::Burns)?, launches_on(Pools::Ours)?);
    println!("{burns} launches on burn's pools, {ours} on ours");
    ensure(burns == ours && ours > 0, || format!("{ours} launches, {burns} on burn's pools").into())
}

/// Checks a run resumed from a checkpoint. Its tensors were uploaded, so their layout differs from
/// the one that steps produce.
fn goes_on(pools: Pools, model: &'static str, items: usize) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let folder = tempfile::tempdir()?;
    let folder = Some(folder.path().to_owned());
    let job = Job { pools, folder, epochs: 1, ..Job::new(model, items, kernels.path().to_owned()) };
    run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?.fitted()?;
    let job = Job { goes_on_from: Some(1), epochs: 3, ..job };
    let left = run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?;
    let ended = left.fitted()?;
    let ratio = ended.predicted.unwrap_or_default().ratio(left.peak());
    println!("{model}: predicted {ratio:.4} of the {} that the driver gave", left.peak());
    let accuracy = match pools {
        Pools::Burns => ACCURACY,
        Pools::Ours => 1.0..=1.0,
    };
    ensure(accuracy.contains(&ratio), || left.complaint(&format!("{ratio:.4} was predicted")))
}

/// Tensors that the program keeps on the device do not count against a budget, and are not free
/// memory.
fn others(pools: Pools) -> Result<(), Failed> {
    let kernels = Kernels::of("mlp", 600)?;
    let memory = Some(Bytes::mib(256));
    let alone = Job { pools, memory, ..Job::new("mlp", 600, kernels.path()) };
    let beside = Job { keeps: KEPT, ..alone.clone() };
    // More is reserved until all kernels are chosen.
    run(&only(CARD), &alone)?.fitted()?;
    let (alone, beside) = (run(&only(CARD), &alone)?, run(&only(CARD), &beside)?);
    let (first, second) = (alone.fitted()?, beside.fitted()?);
    // On firebox's pool, the second plan no longer counts what the first run has tuned.
    let is_same = pools == Pools::Ours || first.predicted == second.predicted;
    ensure(first.plan == second.plan && is_same, || {
        beside.complaint(&format!("other plans: {first:?} {second:?}"))
    })?;
    ensure(beside.peak() >= alone.peak() + KEPT, || beside.complaint("nothing was kept"))?;
    let is_less = second.measured.zip(second.predicted).is_some_and(|(m, p)| m <= p);
    let is_cautious = pools == Pools::Burns && beside.said.contains("later plans");
    ensure(is_less && !is_cautious, || {
        beside.complaint("what the program keeps was taken for training's")
    })?;
    // Free memory is what both leave: the card has room for either of them, but not for both.
    let free = KEPT + Bytes::mib(700);
    let card = device(&card(CARD)).leaving(free.get());
    let machine = firebox_blank::Settings::new([card]);
    let items = 4200;
    let job = Job { pools, keeps: KEPT, ..Job::new("mlp", items, kernels.path()) };
    let left = run_with(&machine, &job, LIMIT * 2, |_, _| ())?;
    left.fitted()?;
    let refused = left.books.as_ref().map_or(0, |books| books.device(0).refused());
    ensure(refused == 0 && left.peak() <= free, || {
        left.complaint(&format!("{} of {free}, {refused} refused", left.peak()))
    })
}

/// Memory that another process holds is not free, and `Budget::free` leaves its margin.
fn free(pools: Pools) -> Result<(), Failed> {
    let kernels = Kernels::of("mlp", 600)?;
    let free = Bytes::gib(1);
    let machine = firebox_blank::Settings::new([device(&card(CARD)).leaving(free.get())]);
    let job = Job { pools, ..Job::new("mlp", 5000, kernels.path()) };
    let left = run_with(&machine, &job, LIMIT * 2, |_, _| ())?;
    left.fitted()?;
    ensure(left.peak() <= free - Bytes::mib(256), || {
        left.complaint(&format!("{} of {free} were taken", left.peak()))
    })
}

/// Another process takes memory between the plan and the step. It keeps it, or gives it back at the
/// next allocation.
fn taken_after_the_plan(pools: Pools, gives_back: bool) -> Result<(), Failed> {
    let kernels = Kernels::of("mlp", 600)?;
    let folder = tempfile::tempdir()?;
    let job = Job {
        pools,
        folder: Some(folder.path().to_owned()),
        ..Job::new("mlp", 600, kernels.path())
    };
    let all = card(CARD).memory().get();
    // The last allocations of the run.
    let nth = match pools {
        Pools::Burns => 2,
        Pools::Ours => 4,
    };
    let mut machine = only(CARD).with_fault(Fault::others_take(nth, all));
    if gives_back {
        machine = machine.with_fault(Fault::others_take(nth + 1, 0));
    }
    let left = run(&machine, &job)?;
    if pools == Pools::Ours && gives_back {
        // firebox's pool gives back what it can, then asks again.
        return left.fitted().map(drop);
    }
    let (kind, words) = left.error()?;
    let expected = match pools {
        Pools::Burns => "DeviceFailed",
        Pools::Ours => "NoPlace",
    };
    ensure(kind == expected, || left.complaint(words))
}

/// The tests.
pub fn tests() -> Vec<Trial> {
    let mut tests: Vec<Trial> =
        [Pools::Burns, Pools::Ours].into_iter().flat_map(tests_on).collect();
    tests.push(test("our_pool_launches_what_burns_do", launches));
    tests.extend([("gpt", 40, 5), ("gpt", 33, 4), ("gpt", 48, 12)].map(|(model, items, parts)| {
        let name = format!("joined_outputs_are_predicted_{model}_{items}_in_{parts}_on_our_pool");
        test(name, move || joins(model, items, parts)).with_ignored_flag(parts != 5)
    }));
    tests
}

fn tests_on(pools: Pools) -> Vec<Trial> {
    let name = |what: &str| format!("{what}{}", pools.suffix());
    // Tuning from nothing takes minutes in an unoptimised build, so only one of these runs every
    // time.
    let tight = TIGHT.map(|(model, items, memory)| {
        let name = name(&format!("planning_stays_within_the_budget_{model}"));
        test(name, move || within(pools, model, items, memory)).with_ignored_flag(model != "cnn")
    });
    let cards = ["T4", CARD, "H100 80GB"].map(|card| {
        let words = card.replace(' ', "_").to_lowercase();
        let name = name(&format!("books_agree_on_{words}"));
        test(name, move || counts(pools, card, Completions::Prompt)).with_ignored_flag(card != CARD)
    });
    let rest = [
        test(name("other_tensors_are_not_part_of_the_budget"), move || others(pools)),
        test(name("what_is_not_free_is_not_used"), move || free(pools)),
        test(name("memory_that_is_taken_after_the_plan_is_an_error"), move || {
            taken_after_the_plan(pools, false)
        }),
        test(name("memory_that_is_taken_and_given_back"), move || {
            taken_after_the_plan(pools, true)
        }),
        test(name("books_agree_where_work_is_done_late"), move || counts(pools, CARD, LATE)),
    ];
    let going_on = [("resnet", 8), ("mlp", 600)].map(|(model, items)| {
        let name = name(&format!("a_run_that_goes_on_is_predicted_{model}"));
        // burn's pages have room for both layouts.
        let is_long = model == "resnet";
        test(name, move || goes_on(pools, model, items)).with_ignored_flag(is_long)
    });
    // A smaller encoder opens the same pages on burn's pools.
    let again = [("gpt", 60), ("encoder", 90)].into_iter();
    let again = again.filter(|(model, _)| *model == "gpt" || pools == Pools::Ours);
    let again = again.map(|(model, items)| {
        let name = name(&format!("what_is_computed_again_is_predicted_{model}"));
        let is_long = model != "gpt" || pools == Pools::Burns;
        test(name, move || computes_again(pools, model, items)).with_ignored_flag(is_long)
    });
    // A page of burn's holds the ResNet either way.
    let parked = [("wide", 128), ("resnet", 24)].into_iter();
    let parked = parked.filter(|(model, _)| *model == "wide" || pools == Pools::Ours);
    let parked = parked.map(|(model, items)| {
        let name = name(&format!("parked_state_is_predicted_{model}"));
        let is_long = model != "wide" || pools == Pools::Burns;
        test(name, move || parks(pools, model, items)).with_ignored_flag(is_long)
    });
    let again = again.chain(parked);
    tight.into_iter().chain(cards).chain(going_on).chain(again).chain(rest).collect()
}
