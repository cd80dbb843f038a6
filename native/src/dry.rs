//! Rehearses an iteration on a GPU without running it. CubeCL compiles the kernels and drops them,
//! and its pools do their bookkeeping on pages that no driver has given out (`DryRun`): what they
//! would have reserved is what the step reserves.
//!
//! Dry runs are process-wide. burn's fusion tells an observer of every operation and of every block
//! of them that runs: blocks with operations of other threads run for real.

use std::cell::RefCell;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use burn::cubecl::dry_run::{DryRun, RealRun};
use burn::cubecl::{MemoryPoolKind, MemoryScope};
use burn::tensor::{Device, Tensor};
use burn_backend::StreamId;
use burn_dispatch::DispatchDevice;
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_ir::{OperationIr, TensorId};
use firebox_plan::MemoryInfo;
use firebox_trace::Bytes;

use crate::error::{TrainError, panicked};
use crate::recording::{self, Recording};
use crate::rehearsal::{Iteration, Rehearsal};

/// What the pools of a device hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pools {
    /// Their pages.
    pub(crate) reserved: Bytes,
    /// What of them buffers take.
    in_use: Bytes,
    /// The pages of other threads: each has pools of its own.
    of_others: Bytes,
    /// The smallest page but for those of the smallest buffers.
    page: Bytes,
}

/// The memory of a GPU. `None` for other devices.
pub(crate) fn pools(device: &Device) -> Option<Pools> {
    let device = device.clone().inner();
    let DispatchDevice::Cube(cube) = device.as_dispatch() else { return None };
    let mut found = Pools::default();
    let own = StreamId::current();
    for stream in cube.client().memory_report(MemoryScope::Device).streams {
        let usage = stream.usage();
        found.reserved += Bytes::new(usage.bytes_reserved);
        found.in_use += Bytes::new(usage.bytes_in_use);
        if stream.stream != own {
            found.of_others += Bytes::new(usage.bytes_reserved);
        }
        let pages = stream.pools.dynamic.iter().filter(|pool| pool.pages > 0);
        let sizes = pages.filter_map(|pool| match pool.kind {
            MemoryPoolKind::Sliced { page_size, .. }
            | MemoryPoolKind::Adaptive { page_size, .. } => {
                Some(Bytes::new(page_size)).filter(|size| *size >= Bytes::mib(1))
            }
            _ => None,
        });
        for size in sizes {
            found.page = if found.page == Bytes::ZERO { size } else { found.page.min(size) };
        }
    }
    Some(found)
}

/// What is free on a GPU, whoever holds the rest. `None` where that is not known: CUDA alone says.
#[cfg(feature = "cuda")]
pub(crate) fn free(device: &Device) -> Option<MemoryInfo> {
    use burn::cubecl::Device as CubeDevice;

    let device = device.clone().inner();
    let DispatchDevice::Cube(CubeDevice::Cuda(cuda)) = device.as_dispatch() else { return None };
    let index = cuda.index;
    let ask = || cudarc::driver::CudaContext::new(index)?.mem_get_info();
    // The question makes a context current: on a thread of its own that affects nothing else.
    let (free, total) = std::thread::scope(|scope| scope.spawn(ask).join()).ok()?.ok()?;
    let bytes = |size: usize| Bytes::new(size as u64);
    Some(MemoryInfo::new(bytes(total), bytes(free), format!("CUDA device {index}")))
}

/// What is free on a GPU: not known.
#[cfg(not(feature = "cuda"))]
pub(crate) fn free(_device: &Device) -> Option<MemoryInfo> {
    None
}

/// The largest buffer of a GPU.
fn largest_buffer(device: &Device) -> Bytes {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(cube) => Bytes::new(cube.client().properties().memory.max_page_size),
        _ => Bytes::MAX,
    }
}

/// What an iteration would take.
pub(crate) struct Rehearsed {
    pub(crate) iteration: Iteration,
    /// The pages before it.
    pub(crate) held: Bytes,
    /// The largest tensor that it makes.
    pub(crate) largest: Bytes,
    /// The largest buffer that the device makes. With a larger tensor, nothing is known.
    pub(crate) most: Bytes,
}

/// How a step is rehearsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// Nothing is computed.
    Dry,
    /// Everything is: the step reads values while it runs, or burn's fusion is not at work.
    Real,
}

/// How an iteration can be rehearsed: takes it for real and without running it, and compares what
/// tensors they make.
///
/// # Errors
///
/// If the step fails.
pub(crate) fn how(
    rehearsal: &mut impl Rehearsal,
    parts: &[Range<usize>],
    device: &Device,
) -> Result<Runs, TrainError> {
    rehearsal.unchanged(|rehearsal| {
        let mut take = |runs: Runs| {
            rehearsal.forget_state();
            let taken = observed(device, runs, || {
                drop(rehearsal.iterate(parts)?);
                synced(device);
                rehearsal.forget_state();
                Ok(())
            });
            taken.and_then(|(result, seen)| result.map(|()| seen))
        };
        // burn's fusion and its tuner learn in the first.
        take(Runs::Real)?;
        let real = take(Runs::Real)?;
        // Without fusion nobody says what is computed, nor by which thread.
        if real.tensors.is_empty() {
            return Ok(Runs::Real);
        }
        spoil(device);
        let dry = take(Runs::Dry);
        give_back(device);
        let is_same = dry.is_ok_and(|dry| dry.program.finish() == real.program.finish());
        Ok(if is_same { Runs::Dry } else { Runs::Real })
    })
}

/// What an iteration is rehearsed for.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) device: &'a Device,
    pub(crate) runs: Runs,
    /// Whether the optimizer has its state.
    pub(crate) has_state: bool,
    /// Whether the Learner takes it: it waits for each step, and metrics compute on its outputs.
    pub(crate) is_learners: bool,
}

/// Rehearses an iteration, in micro-batches of these parts. Where the optimizer has no state yet,
/// it is made in one before. The parameters are those of training, which holds them as
/// well while it makes new ones.
///
/// # Errors
///
/// If the step fails.
pub(crate) fn iteration(
    rehearsal: &mut impl Rehearsal,
    parts: &[Range<usize>],
    Place { device, runs, has_state, is_learners }: Place<'_>,
) -> Result<Rehearsed, TrainError> {
    let now = || pools(device).expect("it is a GPU");
    rehearsal.unchanged(|rehearsal| {
        rehearsal.forget_state();
        give_back(device);
        let (before, begin) = (now(), Instant::now());
        let rehearse = || {
            // Pages fit themselves to what they have held until then, for some steps. Dry ones are
            // soon over. In a loop of the user's own, a step may begin before the one before ends.
            for _ in 0..usize::from(!has_state) + usize::from(runs == Runs::Dry) {
                drop(rehearsal.iterate(parts)?);
                if is_learners {
                    synced(device);
                }
            }
            let outputs = rehearsal.iterate(parts)?;
            synced(device);
            let peak = now();
            drop(outputs);
            synced(device);
            let with_state = now().in_use;
            rehearsal.forget_state();
            synced(device);
            Ok::<_, TrainError>((peak, peak.in_use - with_state, with_state - now().in_use))
        };
        let observed = observed(device, runs, rehearse);
        rehearsal.forget_state();
        give_back(device);
        let (rehearsed, seen) = observed?;
        let cost = match seen.tensors.len() {
            0 => begin.elapsed().as_secs_f64(),
            operations => operations as f64,
        };
        let (peak, outputs, state) = rehearsed?;
        log::debug!("{parts:?}: {peak:?}, {outputs} of outputs");
        // How buffers come to lie differs by a page, and by one more where others ran meanwhile.
        let mut beside = LAUNCHES + peak.page * (1 + u64::from(runs == Runs::Real));
        if is_learners {
            // They compute on a thread, with pools of its own, on the outputs of two batches. What
            // others have before the first step, threads that have ended may have left.
            let there = if has_state { before.of_others } else { Bytes::ZERO };
            beside += (outputs * 2).max(NEW_PAGES) - there;
            // The Learner reads a number of each gradient.
            beside += peak.page;
        }
        // Once the optimizer has its state, that of the rehearsal is one too many.
        let twice = if has_state { state } else { Bytes::ZERO };
        let added = peak.reserved + beside - before.reserved - twice;
        Ok(Rehearsed {
            iteration: Iteration { added, outputs, cost },
            held: before.reserved,
            largest: seen.largest,
            most: largest_buffer(device),
        })
    })
}

/// Which iterations are written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Iterations {
    /// One with the optimizer's state.
    Second,
    /// The one that makes the state, and the next.
    FirstTwo,
}

/// Writes down iterations, in micro-batches of these parts.
///
/// # Errors
///
/// If the step fails.
pub(crate) fn recorded(
    rehearsal: &mut impl Rehearsal,
    parts: &[Range<usize>],
    device: &Device,
    (runs, iterations): (Runs, Iterations),
) -> Result<Recording, TrainError> {
    rehearsal.unchanged(|rehearsal| {
        rehearsal.forget_state();
        give_back(device);
        let recording = Arc::new(Mutex::new(Recording::default()));
        let (unwritten, written) = match iterations {
            Iterations::Second => (1, 1),
            Iterations::FirstTwo => (0, 2),
        };
        let before = observed(device, runs, || {
            (0..unwritten).try_for_each(|_| rehearsal.iterate(parts).map(drop))
        });
        let recorded = before.and_then(|(before, _)| {
            before?;
            let recorded = watched(device, runs, Some(recording.clone()), || {
                (0..written).try_for_each(|_| {
                    recording::record(&recording, device, || {
                        rehearsal.tell_parameters();
                        rehearsal.iterate(parts).map(drop)
                    })
                })
            });
            recorded?.0
        });
        rehearsal.forget_state();
        give_back(device);
        recorded?;
        Ok(std::mem::take(&mut *recording.lock().unwrap_or_else(PoisonError::into_inner)))
    })
}

/// The pages that a thread takes at the least.
const NEW_PAGES: Bytes = Bytes::mib(8);

/// What launches themselves take, for their numbers and shapes: none has been issued.
const LAUNCHES: Bytes = Bytes::kib(512);

/// Fills what is free on the pages of small buffers with what is no number: a value that is read
/// and was not computed is another then. Takes less than 2 MiB.
fn spoil(device: &Device) {
    let device = device.clone().inner();
    let of_size = |size: usize| [(); 24].map(|()| Tensor::<1>::full([size], f32::NAN, &device));
    let spoiled = [1, 1 << 10, 1 << 14].map(of_size);
    synced(&device);
    drop(spoiled);
    synced(&device);
}

/// Waits until everything has run. What failed is told where a value is read.
fn synced(device: &Device) {
    if let Err(error) = device.sync() {
        log::warn!("{device:?}: {error}");
    }
}

/// Gives free pages back to the driver.
pub(crate) fn give_back(device: &Device) {
    synced(device);
    device.memory_cleanup();
    synced(device);
}

/// Takes `work` with this thread's operations observed.
fn observed<R>(
    device: &Device,
    runs: Runs,
    work: impl FnOnce() -> R,
) -> Result<(R, Seen), TrainError> {
    watched(device, runs, None, work)
}

/// The same, written down.
fn watched<R>(
    device: &Device,
    runs: Runs,
    recording: Option<Arc<Mutex<Recording>>>,
    work: impl FnOnce() -> R,
) -> Result<(R, Seen), TrainError> {
    // Two would take each other's blocks for those of strangers, and run for real.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    synced(device);
    let own = Arc::new(Own { stream: StreamId::current(), seen: Mutex::default(), recording });
    let observation = FusionObservation::new(own.clone());
    // A block of another thread that began before has ended then.
    synced(device);
    let guard = (runs == Runs::Dry).then(DryRun::new);
    let result = catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panicked(&*panic));
    synced(device);
    drop(guard);
    drop(observation);
    let seen = std::mem::take(&mut *own.seen());
    result.map(|result| (result, seen))
}

/// Knows the operations of one thread.
struct Own {
    stream: StreamId,
    seen: Mutex<Seen>,
    recording: Option<Arc<Mutex<Recording>>>,
}

/// What was observed.
#[derive(Default)]
struct Seen {
    /// The tensors that the thread has made.
    tensors: HashSet<TensorId>,
    /// The forms of these tensors, in order.
    program: DefaultHasher,
    largest: Bytes,
}

impl Own {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, work: impl FnOnce(&mut Recording)) {
        if let Some(recording) = &self.recording {
            work(&mut recording.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

thread_local! {
    /// Lets launches of this thread run for real.
    static REAL: RefCell<Option<RealRun>> = const { RefCell::new(None) };
}

impl FusionObserver for Own {
    /// The server runs where the caller's stream stands.
    fn registered(&self, operation: &OperationIr) {
        if StreamId::current() != self.stream {
            return;
        }
        self.record(|recording| recording.operation(operation));
        let mut seen = self.seen();
        for tensor in operation.outputs() {
            (&tensor.shape[..], tensor.dtype).hash(&mut seen.program);
            let bytes = tensor.shape.num_elements() as u64 * tensor.dtype.size() as u64;
            seen.largest = seen.largest.max(Bytes::new(bytes));
            seen.tensors.insert(tensor.id);
        }
    }

    /// A block of which another thread has a part runs for real.
    fn block_starts(&self, block: BlockOperations<'_>) {
        let seen = self.seen();
        let is_own = |operation: &OperationIr| {
            operation.outputs().all(|tensor| seen.tensors.contains(&tensor.id))
        };
        if !block.iter().all(is_own) {
            REAL.set(Some(RealRun::new()));
        }
        self.record(|recording| recording.block(block));
    }

    fn block_ran(&self) {
        REAL.set(None);
    }
}
