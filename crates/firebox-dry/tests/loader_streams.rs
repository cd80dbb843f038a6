//! Loader threads on a Vulkan device, real or software. They hold no device memory. If they read
//! values, their pools are opened once, not in every epoch.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use burn_backend::StreamId;
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::Runtime;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use firebox_lazy::{Lazy, LoaderGate, loader_streams, stream_of_worker};
use firebox_trace::Bytes;

type Vulkan = Fusion<CubeBackend<WgpuRuntime, f32, i32, u8>>;

const WORKERS: usize = 2;
const EPOCHS: usize = 3;
const BATCHES: usize = 16;
/// A batch is one megabyte.
const BATCH_SIZE: usize = 1 << 18;

#[derive(Clone)]
struct Halves {
    /// Whether the loader thread reads a value.
    reads: bool,
}

impl<B: Backend> Batcher<B, f32, Tensor<B, 2>> for Halves {
    fn batch(&self, items: Vec<f32>, device: &B::Device) -> Tensor<B, 2> {
        // A tensor that ends on the loader thread.
        drop(Tensor::<B, 1>::from_floats(items.as_slice(), device));
        let rows = items.len() / 1024;
        let half = Tensor::<B, 1>::from_floats(items.as_slice(), device)
            .reshape([rows, 1024])
            .div_scalar(2.0);
        if self.reads {
            assert_eq!(half.clone().max().into_scalar().elem::<f64>(), 0.5);
        }
        half
    }
}

fn loader<B: Backend>(reads: bool) -> Arc<dyn DataLoader<B, Tensor<B, 2>>> {
    DataLoaderBuilder::new(Halves { reads })
        .batch_size(BATCH_SIZE)
        .num_workers(WORKERS)
        .build(InMemDataset::new(vec![1.0; BATCHES * BATCH_SIZE]))
}

/// The bytes that the pools of these streams reserve, and the bytes in use.
fn held(streams: impl IntoIterator<Item = StreamId>) -> [Bytes; 2] {
    let client = WgpuRuntime::client(&WgpuDevice::default());
    let mut held = [Bytes::ZERO; 2];
    for stream in streams {
        let usage = stream.executes(|| client.memory_usage()).expect("the device is healthy");
        held[0] += Bytes::new(usage.bytes_reserved);
        held[1] += Bytes::new(usage.bytes_in_use);
    }
    held
}

/// The streams of a process. CubeCL finds a stream by the remainder of its number.
fn all_streams() -> impl Iterator<Item = StreamId> {
    (0..128).map(|value| StreamId { value })
}

/// What `measure` finds after each epoch.
fn after_each_epoch<B: Backend>(reads: bool, measure: impl Fn() -> Bytes) -> [Bytes; EPOCHS]
where
    B::Device: Default,
{
    let guard = LoaderGate::enter();
    guard.limit(Bytes::mib(2));
    let loader = loader::<B>(reads);
    std::array::from_fn(|_| {
        let mut batches = loader.iter();
        let mut sum = 0.0;
        while let Some(batch) = guard.waiting(|| batches.next()) {
            sum += batch.sum().into_scalar().elem::<f64>();
        }
        assert_eq!(sum, (BATCHES * BATCH_SIZE) as f64 / 2.0);
        B::sync(&B::Device::default()).expect("the device is healthy");
        measure()
    })
}

/// A single test, since it measures all streams of the process.
#[test]
fn pools_of_loader_threads_are_opened_once() {
    let own = held([StreamId::current()])[0];
    let unread = after_each_epoch::<Lazy<Vulkan>>(false, || held(all_streams())[0] - own);
    println!("through Lazy, without reads, all streams: {unread:?}");
    assert_eq!(loader_streams(), []);
    let of_this = held([StreamId::current()])[0] - own;
    assert_eq!(unread, [of_this; EPOCHS], "all lies on the stream of this thread");

    let through_lazy = after_each_epoch::<Lazy<Vulkan>>(true, || {
        let [reserved, in_use] = held(loader_streams());
        assert_eq!(in_use, Bytes::ZERO, "nothing of an epoch is left");
        reserved
    });
    println!("through Lazy, streams of loader threads that read: {through_lazy:?}");
    assert_eq!(loader_streams(), [0, 1].map(stream_of_worker));
    assert!(through_lazy[0] >= Bytes::mib(8 * WORKERS as u64), "each worker has a page");
    assert_eq!(through_lazy[EPOCHS - 1], through_lazy[0]);

    let [before, _] = held(all_streams());
    let directly = after_each_epoch::<Vulkan>(false, || held(all_streams())[0] - before);
    println!("burn's own backend, all streams beside those: {directly:?}");
    assert!(directly[EPOCHS - 1] > directly[0], "burn opens no pools any more: is this needed?");
}
