//! The streams of loader threads.
//!
//! CubeCL gives every thread a stream, and every stream memory pools of its own. The pools are not
//! given back when the thread ends. burn's data loader spawns its threads again in every epoch, so
//! each epoch would open new pools. Here, what a loader thread computes because it reads a value
//! runs on a stream derived from the worker's number. Later epochs reuse the pools of the first.

use std::any::TypeId;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::thread;

use burn_backend::{Backend, Device as _, DeviceId, StreamId};

use crate::threads::handover::{InUse, wait_for_turn};

/// burn's name for the threads of its `MultiThreadDataLoader`, followed by the worker's number.
const THREAD_NAME: &str = "dataloader-";

/// The stream of worker 0. The streams of the others are counted down from it.
const FIRST_STREAM: u64 = (1 << 33) - 1;

/// The stream on which [`Lazy`](crate::Lazy) computes what a loader thread reads. A loader thread
/// is any thread named `dataloader-<worker>`, as burn names those of its data loader.
///
/// The stream is the same in every epoch and for every loader, so a worker's pools are opened once.
///
/// CubeCL has 128 streams by default. It finds a stream by the remainder of its number and numbers
/// ordinary threads from 0 on. The streams of workers are therefore counted down from the last one,
/// for every power of two.
///
/// Two threads can still share a stream in two cases: if workers and computing threads together
/// outnumber the streams, and for a thread started after some epochs, because each of burn's loader
/// threads uses up an ordinary number. Such threads share their pools and wait for each other.
/// Results are the same; only the count of whose bytes a pool holds is lost.
///
/// To learn what the pools of a worker hold, ask on its stream: `stream_of_worker(0).executes(||
/// client.memory_usage())`.
///
/// ```
/// use firebox_lazy::stream_of_worker;
/// let index = |worker| stream_of_worker(worker).value % 128;
/// assert_eq!([index(0), index(1), index(2)], [127, 126, 125]);
/// ```
pub fn stream_of_worker(worker: u16) -> StreamId {
    StreamId { value: FIRST_STREAM - u64::from(worker) }
}

thread_local! {
    /// The devices that this thread has met.
    static MET: RefCell<Vec<(TypeId, DeviceId)>> = const { RefCell::new(Vec::new()) };
}

/// Makes the backend set up a device on this thread, at the thread's first use of it.
///
/// CubeCL creates a server when a device is first used. The server of firebox's pool runs on the
/// thread of burn's fusion and can be created by any other thread, but not by that one.
pub(crate) fn meet<B: Backend>(device: &B::Device) {
    let key = (TypeId::of::<B>(), device.to_id());
    MET.with_borrow_mut(|met| {
        if !met.contains(&key) {
            met.push(key);
            // Asking for the name asks the device. The name is not used.
            B::name(device);
        }
    });
}

/// The values of [`WORKER`] before the thread's name was looked at, and on threads that are not
/// loader threads.
const UNKNOWN: u32 = u32::MAX;
const NO_WORKER: u32 = u32::MAX - 1;

thread_local! {
    /// This thread's worker number. Stored, because a thread keeps its name.
    static WORKER: Cell<u32> = const { Cell::new(UNKNOWN) };
}

/// This thread's worker number. `None` if it is not a loader thread.
#[inline]
pub(crate) fn current_worker() -> Option<u16> {
    match WORKER.get() {
        NO_WORKER => None,
        UNKNOWN => find_worker(),
        worker => Some(worker as u16),
    }
}

#[cold]
fn find_worker() -> Option<u16> {
    let worker = thread::current().name().and_then(worker_of_name);
    WORKER.set(worker.map_or(NO_WORKER, u32::from));
    worker
}

/// Whether this thread is a loader thread that has made a call. For destructors: does not look at
/// the name, which is gone on a thread that is ending.
#[inline]
pub(crate) fn is_loader_thread() -> bool {
    WORKER.get() < NO_WORKER
}

/// The worker's number in the name of its thread.
pub(crate) fn worker_of_name(name: &str) -> Option<u16> {
    let number = name.strip_prefix(THREAD_NAME)?;
    number.bytes().all(|digit| digit.is_ascii_digit()).then(|| number.parse().ok())?
}

/// Runs a call of the backend. On a loader thread it runs on the worker's stream.
#[inline]
pub(crate) fn on_stream<B: Backend, R>(call: impl FnOnce() -> R) -> R {
    let _turn = wait_for_turn::<B>();
    match current_worker() {
        None => call(),
        Some(worker) => stream_of_worker(worker).executes(call),
    }
}

/// Like [`on_stream`], for a result that the backend computes each time it is polled. `held` is
/// what the call uses.
pub(crate) async fn poll_on_stream<B: Backend, F: Future>(held: InUse, result: F) -> F::Output {
    let mut result = pin!(result);
    let output = poll_fn(|context| on_stream::<B, _>(|| result.as_mut().poll(context))).await;
    drop(held);
    output
}

#[cfg(test)]
mod tests {
    use std::thread::Builder;

    use burn::backend::Flex;
    use burn_std::future::block_on;

    use super::*;

    fn on_thread<R: Send + 'static>(name: &str, run: impl FnOnce() -> R + Send + 'static) -> R {
        Builder::new().name(name.into()).spawn(run).expect("a thread").join().expect("it ends")
    }

    #[test]
    fn names_of_loader_threads_have_a_number() {
        assert_eq!(worker_of_name("dataloader-0"), Some(0));
        assert_eq!(worker_of_name("dataloader-65535"), Some(u16::MAX));
        for other in ["main", "dataloader-", "dataloader-+1", "dataloader-65536", "my dataloader-1"]
        {
            assert_eq!(worker_of_name(other), None, "{other}");
        }
    }

    #[test]
    fn calls_of_a_loader_thread_run_on_the_stream_of_its_number() {
        for _epoch in 0..2 {
            let streams = on_thread("dataloader-3", || {
                let own = StreamId::current();
                let called = on_stream::<Flex, _>(StreamId::current);
                let polled = block_on(poll_on_stream::<Flex, _>(InUse::default(), async {
                    StreamId::current()
                }));
                assert_eq!(StreamId::current(), own, "the thread has its own stream back");
                assert!(is_loader_thread());
                [called, polled]
            });
            assert_eq!(streams, [stream_of_worker(3); 2]);
        }
    }

    #[test]
    fn calls_of_other_threads_stay_on_their_stream() {
        for name in ["main", "dataloader"] {
            on_thread(name, || {
                assert_eq!(on_stream::<Flex, _>(StreamId::current), StreamId::current());
                assert!(!is_loader_thread());
            });
        }
    }

    #[test]
    fn streams_of_workers_are_far_from_those_of_ordinary_threads() {
        for max_streams in [8, 32, 128] {
            let indices = (0..4).map(|worker| stream_of_worker(worker).value % max_streams);
            assert!(indices.eq((0..4).map(|worker| max_streams - 1 - worker)));
        }
    }
}
