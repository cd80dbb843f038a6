//! Rehearses an iteration on a GPU without running it. CubeCL compiles the kernels and drops them,
//! and its pools do their bookkeeping on pages that no driver has given out (`DryRun`): what they
//! would have reserved is what the step reserves.
//!
//! Dry runs are process-wide. burn's fusion tells an observer of every operation and of every block
//! of them that runs: blocks with operations of other threads run for real.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::cubecl::MemoryScope;
use burn::cubecl::dry_run::{DryRun, RealRun};
use burn::tensor::{Device, Tensor};
use burn_backend::StreamId;
use burn_dispatch::DispatchDevice;
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_ir::{OperationIr, TensorId};
use firebox_plan::MemoryInfo;
use firebox_trace::Bytes;

use crate::error::TrainError;
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
    /// Everything is: the step reads values while it runs.
    Real,
}

/// How an iteration can be rehearsed: takes it for real and without running it, and compares what
/// tensors they make.
///
/// # Errors
///
/// If burn's fusion is not at work, or the step fails.
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
        spoil(device);
        let dry = take(Runs::Dry);
        give_back(device);
        if real.tensors.is_empty() {
            return Err(TrainError::UnknownDevice {
                device: format!("{device:?}, without fusion"),
            });
        }
        let is_same = dry.is_ok_and(|dry| dry.program.finish() == real.program.finish());
        Ok(if is_same { Runs::Dry } else { Runs::Real })
    })
}

/// Rehearses an iteration, in micro-batches of these parts. Where the optimizer has no state yet,
/// it is made in an iteration before. The parameters are those of training, which holds them as
/// well while it makes new ones.
///
/// # Errors
///
/// If the step fails.
pub(crate) fn iteration(
    rehearsal: &mut impl Rehearsal,
    parts: &[Range<usize>],
    (device, runs, has_state): (&Device, Runs, bool),
) -> Result<Rehearsed, TrainError> {
    let now = || pools(device).expect("it is a GPU");
    rehearsal.unchanged(|rehearsal| {
        rehearsal.forget_state();
        give_back(device);
        let before = now();
        let rehearse = || {
            if !has_state {
                drop(rehearsal.iterate(parts)?);
                synced(device);
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
        let (rehearsed, seen) = observed(device, runs, rehearse)?;
        give_back(device);
        let (peak, outputs, state) = rehearsed?;
        log::debug!("{parts:?}: {peak:?}, {outputs} of outputs");
        // Metrics compute on a thread, with pools of its own, on the outputs of two batches.
        // What others have before the first step, threads that have ended may have left.
        let there = if has_state { before.of_others } else { Bytes::ZERO };
        let beside = (outputs * 2).max(SMALLEST_PAGES) - there + LAUNCHES;
        // More micro-steps than were rehearsed may open one of the smallest pages more.
        let beside = beside + SMALLEST_PAGES;
        // Once the optimizer has its state, that of the rehearsal is one too many.
        let twice = if has_state { state } else { Bytes::ZERO };
        let added = peak.reserved + beside - before.reserved - twice;
        Ok(Rehearsed {
            iteration: Iteration { added, outputs },
            held: before.reserved,
            largest: seen.largest,
            most: largest_buffer(device),
        })
    })
}

/// The pages that a thread takes at the least.
const SMALLEST_PAGES: Bytes = Bytes::mib(8);

/// What launches themselves take, for their numbers and shapes: none has been issued.
const LAUNCHES: Bytes = Bytes::kib(512);

/// Fills what is free on the pages of small buffers with what is no number: a value that is read
/// and was not computed is another then.
fn spoil(device: &Device) {
    let device = device.clone().inner();
    let spoiled = [(); 256].map(|()| Tensor::<1>::full([1 << 14], f32::NAN, &device));
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
    synced(device);
    let own = Arc::new(Own { stream: StreamId::current(), seen: Mutex::default() });
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

fn panicked(panic: &(dyn Any + Send)) -> TrainError {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
    TrainError::StepPanicked { message: message.to_owned() }
}

/// Knows the operations of one thread.
struct Own {
    stream: StreamId,
    seen: Mutex<Seen>,
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
    }

    fn block_ran(&self) {
        REAL.set(None);
    }
}
