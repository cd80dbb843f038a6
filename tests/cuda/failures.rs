//! Tests refusals by the driver: each allocation in turn, and each call that can fail.
//!
//! Training must end with a typed error or continue unaffected. It never hangs, never ends the
//! process, and makes no optimizer step from a failure.

use burn::backend::Flex;
use burn::record::{CompactRecorder, Recorder};
use firebox_blank::{Entry, Fault};
use firebox_testing::zoo::{Cnn, Gpt, Mlp, Zoo};
use libtest_mimic::{Failed, Trial};

use crate::child::{Job, Pools};
use crate::trial::{CARD, Kernels, Left, ensure, only, run, test};

/// Each epoch has two batches.
const EPOCHS: usize = 3;
const BATCHES: usize = 2;

/// A model to test, its batch size, and whether its checkpoint can be read.
#[derive(Clone, Copy)]
struct Subject {
    model: &'static str,
    items: usize,
    reads: fn(&std::path::Path) -> bool,
    pools: Pools,
}

const MLP: Subject =
    Subject { model: "mlp", items: 600, reads: reads::<Mlp<Flex>>, pools: Pools::Burns };
const CNN: Subject =
    Subject { model: "cnn", items: 60, reads: reads::<Cnn<Flex>>, pools: Pools::Burns };
const GPT: Subject =
    Subject { model: "gpt", items: 20, reads: reads::<Gpt<Flex>>, pools: Pools::Burns };

/// Whether the model of a checkpoint can be read without a GPU.
fn reads<M: Zoo<Flex>>(file: &std::path::Path) -> bool {
    let device = Default::default();
    let record =
        Recorder::<Flex>::load::<M::Record>(&CompactRecorder::new(), file.to_owned(), &device);
    record.is_ok_and(|record| {
        let _ = M::new(&device).load_record(record);
        true
    })
}

/// Outcome of a run in which a fault occurred.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Training ended as if no fault had occurred.
    Fitted,
    /// Training ended with an error of this kind.
    Error(String),
}

/// Checks a run in which a fault may have occurred.
fn outcome(left: &Left, folder: &std::path::Path, subject: Subject) -> Result<Outcome, Failed> {
    let ended = left.ended.as_ref().ok_or_else(|| left.complaint("the process ended early"))?;
    let misuses = left.books.as_ref().map_or(0, |books| books.device(0).misuses());
    let Some((kind, _)) = &ended.error else {
        ensure(left.status.success(), || left.complaint("the exit status is another"))?;
        ensure(misuses == 0, || left.complaint("the driver was misused"))?;
        return Ok(Outcome::Fitted);
    };
    left.error()?;
    let typed = ["DeviceFailed", "NotReady", "Nvidia", "NoPlace"];
    ensure(typed.contains(&kind.as_str()), || left.complaint("the error does not tell the cause"))?;
    if let Some((epoch, iteration)) = ended.state {
        let steps = (epoch - 1) * BATCHES + iteration;
        let whole = steps == 0 || ended.steps.is_multiple_of(steps);
        ensure(whole && (steps > 0) == (ended.steps > 0), || {
            left.complaint(&format!("{} calls of the optimizer for {steps} steps", ended.steps))
        })?;
        // The checkpoints of all earlier epochs exist and can be read.
        for epoch in 1..epoch {
            let file = folder.join(format!("checkpoint/model-{epoch}"));
            // burn keeps the checkpoints of the last epochs only.
            let is_kept = epoch + 1 == ended.state.map_or(0, |(epoch, _)| epoch);
            // burn writes the last checkpoint on an unnamed thread while training continues. A
            // failing device ends that thread too.
            let was_being_written = left.said.contains("thread '<unnamed>'");
            ensure(!is_kept || was_being_written || (subject.reads)(&file), || {
                left.complaint(&format!("the checkpoint of epoch {epoch} cannot be read"))
            })?;
        }
    }
    Ok(Outcome::Error(kind.clone()))
}

/// Runs training with the given faults.
fn suffer(subject: Subject, faults: Vec<Fault>) -> Result<(Outcome, Left), Failed> {
    let kernels = Kernels::of(subject.model, subject.items)?;
    let folder = tempfile::tempdir()?;
    let job = Job {
        epochs: EPOCHS,
        batches: BATCHES,
        validates: true,
        folder: Some(folder.path().to_owned()),
        pools: subject.pools,
        ..Job::new(subject.model, subject.items, kernels.path())
    };
    let settings =
        faults.into_iter().fold(only(CARD), |settings, fault| settings.with_fault(fault));
    let left = run(&settings, &job)?;
    Ok((outcome(&left, folder.path(), subject)?, left))
}

/// Refuses each allocation of a run in turn.
fn each_allocation(subject: Subject) -> Result<(), Failed> {
    let (whole, left) = suffer(subject, Vec::new())?;
    ensure(whole == Outcome::Fitted, || left.complaint("it fails without a fault"))?;
    let is_allocation = |entry: &&Entry| matches!(entry, Entry::Allocated { .. });
    let allocations = left.journal.iter().filter(is_allocation).count() as u64;
    ensure(allocations > 1, || left.complaint("nothing was allocated"))?;
    for nth in 1..=allocations {
        let (outcome, left) = suffer(subject, vec![Fault::refuse(nth)])?;
        let refused = left.books.as_ref().map_or(0, |books| books.device(0).refused());
        // Which buffers share a page depends on the order of threads, and so does the number of
        // pages. On firebox's pool, a buffer whose page is refused may find a place on another.
        let is_error = matches!(outcome, Outcome::Error(_));
        ensure(is_error || refused == 0 || subject.pools == Pools::Ours, || {
            left.complaint(&format!("allocation {nth} was refused, and nobody noticed"))
        })?;
        println!(
            "{}: allocation {nth} of {allocations}: {outcome:?}, {:.1?}",
            subject.model, left.time
        );
    }
    Ok(())
}

/// Makes all calls of a function fail from a given one on, early and in the middle of training.
///
/// A single failing call could be the tuner's, which continues with another kernel.
fn call(pools: Pools, function: &'static str, nths: &'static [u64], error: u32) -> Trial {
    let subject = Subject { pools, ..MLP };
    let name = format!("a_failure_of_{}_is_an_error{}", function.to_lowercase(), pools.suffix());
    test(name, move || {
        for nth in nths {
            let fault = Fault::call(function, *nth, error).times(u64::MAX);
            let (outcome, left) = suffer(subject, vec![fault])?;
            let happened = left.journal.iter().any(|entry| matches!(entry, Entry::Fault { .. }));
            ensure(happened, || left.complaint(&format!("{function} was not called {nth} times")))?;
            println!("{function} {nth}: {outcome:?}, {:.1?}", left.time);
            ensure(matches!(outcome, Outcome::Error(_)), || left.complaint("nobody noticed"))?;
        }
        Ok(())
    })
}

/// Pinned memory is only faster. Training continues without it, or reports an error.
fn without_pinned_memory() -> Result<(), Failed> {
    for nth in [1, 2] {
        let fault = Fault::call("cuMemAllocHost_v2", nth, Fault::OUT_OF_MEMORY).times(u64::MAX);
        let (outcome, left) = suffer(MLP, vec![fault])?;
        println!("pinned memory refused from call {nth} on: {outcome:?}, {:.1?}", left.time);
    }
    Ok(())
}

/// The tests.
pub fn tests() -> Vec<Trial> {
    let of_each = [Pools::Burns, Pools::Ours].into_iter().flat_map(|pools| {
        let allocations = [MLP, CNN, GPT].map(|subject| {
            let subject = Subject { pools, ..subject };
            let name = format!(
                "each_allocation_that_is_refused_is_an_error_{}{}",
                subject.model,
                pools.suffix()
            );
            test(name, move || each_allocation(subject)).with_ignored_flag(subject.model != "mlp")
        });
        let calls = [
            // firebox's pool has one stream for all threads.
            match pools {
                Pools::Burns => call(pools, "cuStreamCreate", &[1, 2, 3], Fault::OUT_OF_MEMORY),
                Pools::Ours => call(pools, "cuStreamCreate", &[1, 2], Fault::OUT_OF_MEMORY),
            },
            call(pools, "cuModuleLoadData", &[1, 20], Fault::INVALID_PTX),
            call(pools, "cuLaunchKernel", &[1, 60, 150], Fault::LAUNCH_OUT_OF_RESOURCES),
            call(pools, "cuEventSynchronize", &[1, 12], Fault::ILLEGAL_ADDRESS),
        ];
        allocations.into_iter().chain(calls)
    });
    let pinned = test("training_without_pinned_memory_ends", without_pinned_memory);
    of_each.chain([pinned]).collect()
}
