//! Replays of traces reserve what the program itself reserves, whichever backend recorded the
//! trace.

mod programs;

use std::sync::Mutex;
use std::thread;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::ir::DeviceProperties;
use firebox_dry::{Capability, Card, Cuda, Dry, DryRuntime, Lease, Target, Usage, Wgpu};
use firebox_lazy::{Lazy, LazyBackend, StepRecorder};
use firebox_trace::{Bytes, Category, Estimate, Mark, MemoryModel, Question, Step, Trace};

use crate::programs::{Classifier, Task, train};

type Fused<T> = Fusion<CubeBackend<DryRuntime<T>, f32, i32, u8>>;
type Plain<T> = CubeBackend<DryRuntime<T>, f32, i32, u8>;

/// Tests run one at a time: they share four devices.
static DEVICES: Mutex<()> = Mutex::new(());

/// What the program reserves when it runs on the device itself. It runs through `Lazy`, as a user's
/// program does, since `Lazy` does not pass on persistent allocations.
fn direct<B, T>(properties: &DeviceProperties, items: usize) -> Usage
where
    T: Target,
    B: Backend<Device = firebox_dry::DryDevice<T>>,
    Autodiff<Lazy<B>>: AutodiffBackend<Device = firebox_dry::DryDevice<T>>,
{
    let mut lease = Lease::<T>::take(properties).expect("a dry device");
    let run = lease.run(|device| {
        let model = Classifier::<Autodiff<Lazy<B>>>::new(device);
        B::sync(device).expect("a dry device does not fail");
        train(&model, items, device);
        drop(model);
        B::sync(device).expect("a dry device does not fail");
    });
    run.expect("the model trains").1
}

/// The trace of the same program, recorded on `L`.
fn record<L>(items: usize, device: &L::Device) -> Trace
where
    L: Backend,
    Autodiff<Lazy<L>>: AutodiffBackend<Device = L::Device> + LazyBackend<Base = L>,
{
    programs::record::<L, Classifier<Autodiff<Lazy<L>>>>(items, device)
}

fn recorded_on_flex(items: usize) -> Trace {
    record::<Flex>(items, &Default::default())
}

fn rtx_4090() -> DeviceProperties {
    Card::named("4090").expect("in the table").properties()
}

/// A device like lavapipe: no page above 128 MiB.
fn small_vulkan() -> DeviceProperties {
    let mut properties = Card::new("small", Bytes::mib(512), Capability::new(8, 6), 8).properties();
    properties.memory.alignment = 32;
    properties
}

#[test]
fn a_replay_reserves_what_the_program_reserves() {
    let _alone = DEVICES.lock();
    fn check<T: Target>(properties: &DeviceProperties) {
        for items in [64, 1000] {
            let expected = direct::<Fused<T>, T>(properties, items);
            let lease = Lease::<T>::take(properties).expect("a dry device");
            let trace = record::<Fused<T>>(items, lease.device());
            drop(lease);
            let footprint = Dry::<Fused<T>>::new(properties.clone()).footprint(&trace);
            assert_eq!(footprint.unaccounted, Vec::<String>::new());
            assert_eq!(footprint.estimate, Estimate::Heuristic);
            assert_eq!(footprint.peak, expected.peak, "{} items on {}", items, T::NAME);
        }
    }
    check::<Cuda>(&rtx_4090());
    check::<Wgpu>(&small_vulkan());
}

#[test]
fn a_replay_without_fusion_reserves_what_the_program_reserves() {
    let _alone = DEVICES.lock();
    let properties = small_vulkan();
    let expected = direct::<Plain<Wgpu>, Wgpu>(&properties, 500);
    let lease = Lease::<Wgpu>::take(&properties).expect("a dry device");
    let trace = record::<Plain<Wgpu>>(500, lease.device());
    drop(lease);
    let footprint = Dry::<Plain<Wgpu>>::new(properties).footprint(&trace);
    assert_eq!(footprint.peak, expected.peak);
}

#[test]
fn a_trace_of_the_cpu_backend_is_translated() {
    let _alone = DEVICES.lock();
    let properties = rtx_4090();
    let expected = direct::<Fused<Cuda>, Cuda>(&properties, 1000);
    let trace = recorded_on_flex(1000);
    let model = Dry::<Fused<Cuda>>::new(properties).with_traces_of_ints(DType::I64);
    let footprint = model.replay(&trace).expect("the trace runs");
    assert_eq!(footprint.peak, expected.peak);
}

#[test]
fn a_footprint_says_what_its_pages_are_for() {
    let _alone = DEVICES.lock();
    let trace = recorded_on_flex(2000);
    let model = Dry::<Fused<Wgpu>>::new(small_vulkan()).with_traces_of_ints(DType::I64);
    let footprint = model.replay(&trace).expect("the trace runs");
    let paging = footprint.paging.as_ref().expect("a GPU has pages");
    assert_eq!(footprint.categories.total(), footprint.peak);
    assert!(footprint.categories.get(Category::Activation) > Bytes::mib(12), "{footprint:?}");
    assert!(
        footprint.baseline > Bytes::ZERO && footprint.baseline < Bytes::mib(2),
        "{}",
        footprint.baseline
    );
    assert_eq!(footprint.timeline.len(), trace.steps.len());
    assert_eq!(footprint.timeline.last().map(|moment| moment.peak), Some(paging.reserved));
    assert_eq!(footprint.timeline[footprint.at.0 as usize].peak, paging.reserved);
    assert!(matches!(trace.steps[0], Step::Mark(_)));
    assert_eq!(footprint.timeline[0].live, footprint.baseline);
    assert!(paging.in_use < paging.reserved && paging.fragmentation() > 0.0);
    assert!(!paging.is_refused());
}

#[test]
fn buffers_share_a_place_if_one_is_dropped_before_the_other_is_asked_for() {
    let _alone = DEVICES.lock();
    let peak = |drops_first: bool| {
        let device = Default::default();
        let large = || Tensor::<Lazy<Flex>, 1>::zeros([25 << 20], &device);
        let trace = StepRecorder::new().record::<Flex, _>(|| {
            let first = large();
            if drops_first {
                drop(first);
                return large();
            }
            let second = large();
            drop(first);
            second
        });
        let trace = trace.expect("nothing is read").discard().trace;
        Dry::<Plain<Wgpu>>::new(small_vulkan()).footprint(&trace).peak
    };
    assert_eq!(peak(false) - peak(true), Bytes::mib(128));
    assert!(peak(true) < Bytes::mib(128 + 64));
}

#[test]
fn what_is_alive_is_known_where_the_device_answers() {
    let _alone = DEVICES.lock();
    let device = Default::default();
    let large = || Tensor::<Lazy<Flex>, 1>::zeros([25 << 20], &device);
    let trace = StepRecorder::new().record::<Flex, _>(|| {
        let first = large();
        firebox_lazy::mark::<Flex>(Mark::Settle);
        let second = large();
        firebox_lazy::mark::<Flex>(Mark::Drain);
        drop(first);
        firebox_lazy::mark::<Flex>(Mark::Settle);
        second
    });
    let trace = trace.expect("nothing is read").discard().trace;
    let footprint = Dry::<Plain<Wgpu>>::new(small_vulkan()).footprint(&trace);
    let marks = trace.steps.iter().zip(&footprint.timeline);
    let marks = marks.filter(|(step, _)| matches!(step, Step::Mark(_)));
    let live: Vec<Bytes> = marks.map(|(_, moment)| moment.live - footprint.baseline).collect();
    assert_eq!(live, [100, 200, 100].map(Bytes::mib));
}

#[test]
fn footprints_do_not_depend_on_threads_or_order() {
    let _alone = DEVICES.lock();
    let traces: Vec<Trace> = [8, 100, 900, 2500].into_iter().map(recorded_on_flex).collect();
    let model = Dry::<Fused<Wgpu>>::new(small_vulkan()).with_traces_of_ints(DType::I64);
    let first: Vec<Bytes> = traces.iter().map(|trace| model.footprint(trace).peak).collect();
    let parallel: Vec<Vec<Bytes>> = thread::scope(|scope| {
        let (model, traces) = (&model, &traces);
        let asking: Vec<_> = (0..4)
            .map(|turn| {
                scope.spawn(move || {
                    let mut peaks = vec![Bytes::ZERO; traces.len()];
                    for step in 0..traces.len() {
                        let index = (step * 3 + turn) % traces.len();
                        peaks[index] = model.footprint(&traces[index]).peak;
                    }
                    peaks
                })
            })
            .collect();
        asking.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for peaks in parallel {
        assert_eq!(first, peaks);
    }
}

#[test]
fn a_buffer_that_no_page_holds_is_refused() {
    let _alone = DEVICES.lock();
    let device = Default::default();
    let trace = StepRecorder::new().record::<Flex, _>(|| {
        let large = Tensor::<Lazy<Flex>, 2>::zeros([1 << 16, 1 << 10], &device);
        large.clone().sum() + large.max()
    });
    let trace = trace.expect("nothing is read").discard().trace;
    let footprint = Dry::<Plain<Wgpu>>::new(small_vulkan()).footprint(&trace);
    let paging = footprint.paging.expect("a GPU has pages");
    assert!(paging.is_refused());
    assert_eq!(paging.largest_buffer, Bytes::mib(256));
    assert_eq!(paging.largest_page, Bytes::mib(128));
    assert_eq!(footprint.peak, Bytes::MAX);
}

#[test]
fn what_certainly_needs_more_than_is_asked_for_is_not_replayed() {
    let _alone = DEVICES.lock();
    let dry = Dry::<Fused<Cuda>>::new(rtx_4090()).with_traces_of_ints(DType::I64);
    let trace = recorded_on_flex(64);
    let enough = Bytes::new(1);
    let bound = dry.answer(&Question { enough, ..Question::new(&trace) });
    assert_eq!((bound.estimate, dry.replays()), (Estimate::LowerBound, 0));
    assert_eq!((bound.timeline.len(), bound.categories.total()), (trace.steps.len(), bound.peak));
    let replayed = dry.footprint(&trace);
    assert!(dry.at_least(&trace) <= bound.peak && bound.peak <= replayed.peak, "{bound}");
    assert!(dry.replays() > 0);
}

/// CubeCL panics at them.
#[test]
fn tensors_that_are_counted_with_64_bits_are_not_replayed_if_the_card_cannot_hold_them() {
    let _alone = DEVICES.lock();
    let device = Default::default();
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        let large = Tensor::<Lazy<Flex>, 2>::zeros([1 << 17, 1 << 17], &device);
        let product = large.clone().matmul(large.clone()).matmul(large.clone());
        product.matmul(large)
    });
    let trace = recording.expect("nothing is read").discard().trace;
    let dry = Dry::<Fused<Cuda>>::new(rtx_4090());
    let footprint = dry.footprint(&trace);
    assert_eq!((footprint.estimate, dry.replays()), (Estimate::LowerBound, 0));
    assert!(footprint.peak >= Bytes::gib(64), "{footprint}");
}

#[test]
fn a_call_that_cannot_be_replayed_is_named() {
    let _alone = DEVICES.lock();
    let device = Default::default();
    let values = Tensor::<Lazy<Flex>, 1>::ones([1 << 20], &device);
    let recording = StepRecorder::new().record::<Flex, _>(|| values.clone().sort(0) * 2.0);
    let trace = recording.expect("nothing is read").discard().trace;
    let footprint = Dry::<Fused<Cuda>>::new(rtx_4090()).footprint(&trace);
    assert_eq!(footprint.unaccounted, ["float_sort"]);
    assert_eq!(footprint.estimate, Estimate::Heuristic);
    assert!(footprint.peak > Bytes::mib(8));
}
