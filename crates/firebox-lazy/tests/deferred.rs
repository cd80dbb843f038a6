//! Deferred calls: computed once, by the thread that needs the result, as if that thread had made
//! them itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use burn::backend::Flex;
use burn::tensor::{Bool, Distribution, Int, Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use firebox_lazy::{CustomOp, Lazy, StepRecorder};

type B = Lazy<Flex>;
type T = Tensor<B, 1>;

/// Runs `work` on a loader thread.
fn on_loader_thread<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| loader_thread(scope, 0, work).join().expect("it ends"))
}

fn loader_thread<'s, R: Send + 's>(
    scope: &'s thread::Scope<'s, '_>,
    number: usize,
    work: impl FnOnce() -> R + Send + 's,
) -> thread::ScopedJoinHandle<'s, R> {
    let thread = thread::Builder::new().name(format!("dataloader-{number}"));
    thread.spawn_scoped(scope, work).expect("a thread")
}

/// The threads on which an operation has run.
type Ran = Arc<Mutex<Vec<ThreadId>>>;

/// The sine of a tensor. Adds the thread that computes it to `ran`.
fn noted_sine(tensor: T, ran: &Ran) -> T {
    let tensor = tensor.into_primitive().tensor();
    let (form, ran) = ((tensor.shape(), tensor.dtype()), ran.clone());
    let sine = CustomOp::new("noted_sine").call::<Flex, _, _>(tensor, form, move |tensor| {
        ran.lock().expect("nobody panics").push(thread::current().id());
        <Flex as burn_backend::ops::FloatTensorOps<Flex>>::float_sin(tensor)
    });
    Tensor::from_primitive(TensorPrimitive::Float(sine))
}

fn floats(tensor: T) -> Vec<f32> {
    tensor.into_data().to_vec().expect("floats")
}

fn ask(ran: &Ran) -> T {
    let tensor = T::from_floats([1.0, 2.0], &Default::default());
    noted_sine(tensor, ran) * 2.0
}

#[test]
fn it_is_computed_once_where_it_is_needed() {
    let ran = Ran::default();
    let tensor = on_loader_thread(|| ask(&ran));
    assert_eq!(tensor.dims(), [2]);
    assert!(ran.lock().expect("nobody panics").is_empty(), "nobody has needed it");
    let expected = [1f32.sin() * 2.0, 2f32.sin() * 2.0];
    assert_eq!(floats(tensor.clone()), expected);
    assert_eq!(floats(tensor), expected);
    assert_eq!(*ran.lock().expect("nobody panics"), [thread::current().id()]);
}

#[test]
fn what_nobody_needs_is_never_computed() {
    let ran = Ran::default();
    drop(on_loader_thread(|| ask(&ran)));
    on_loader_thread(|| drop(ask(&ran)));
    let (needed, other) = on_loader_thread(|| {
        let tensor = T::from_floats([1.0], &Default::default());
        (tensor.clone() + 1.0, noted_sine(tensor, &ran))
    });
    assert_eq!(floats(needed), [2.0]);
    drop(other);
    assert!(ran.lock().expect("nobody panics").is_empty());
}

#[test]
fn two_threads_that_need_the_same_compute_it_once() {
    for _ in 0..50 {
        let ran = Ran::default();
        let shared = on_loader_thread(|| ask(&ran));
        let [first, second] = [&shared, &shared].map(|shared| shared.clone() + 1.0);
        let (first, second) = thread::scope(|scope| {
            let other = scope.spawn(|| floats(second));
            (floats(first), other.join().expect("it reads"))
        });
        assert_eq!(first, second);
        assert_eq!(ran.lock().expect("nobody panics").len(), 1);
        assert_eq!(floats(shared + 1.0), first);
    }
}

/// A tensor whose only call takes a while.
fn slow(start: f32) -> T {
    let tensor = T::from_floats([start], &Default::default()).into_primitive().tensor();
    let form = (tensor.shape(), tensor.dtype());
    let op = CustomOp::new("slow").call::<Flex, _, _>(tensor, form, |tensor| {
        thread::sleep(Duration::from_millis(5));
        tensor
    });
    T::from_primitive(TensorPrimitive::Float(op))
}

#[test]
fn a_tensor_that_another_thread_computes_is_waited_for() {
    for _ in 0..10 {
        // By other threads that keep it, and by a loader thread that computes for itself.
        let shared = on_loader_thread(|| slow(3.0));
        let barrier = Barrier::new(4);
        let read = || {
            let shared = shared.clone();
            barrier.wait();
            floats(shared)
        };
        let all = thread::scope(|scope| {
            let others = [scope.spawn(read), scope.spawn(read), loader_thread(scope, 0, read)];
            let mine = read();
            let others = others.map(|thread| thread.join().expect("it reads"));
            [vec![mine], others.to_vec()].concat()
        });
        assert!(all.iter().all(|read| *read == [3.0]), "{all:?}");
    }
}

#[test]
fn loader_threads_that_read_what_they_share_do_not_wait_for_each_other_for_ever() {
    for _ in 0..10 {
        let (first, second) = on_loader_thread(|| (slow(1.0), slow(2.0)));
        let sum = |a: &T, b: &T| floats(a.clone() + b.clone());
        let (one_way, other_way) = (|| sum(&first, &second), || sum(&second, &first));
        let sums = thread::scope(|scope| {
            let there = [loader_thread(scope, 0, one_way), loader_thread(scope, 1, other_way)];
            let mine = other_way();
            let there = there.map(|thread| thread.join().expect("it reads"));
            [there.concat(), mine].concat()
        });
        assert_eq!(sums, [3.0; 3]);
        assert_eq!((floats(first), floats(second)), (vec![1.0], vec![2.0]));
    }
}

#[test]
fn a_tensor_that_is_read_twice_in_one_call_is_computed_once() {
    let ran = Ran::default();
    let values = on_loader_thread(|| {
        let tensor = ask(&ran);
        let twice = tensor.clone() * tensor.clone() + tensor;
        floats(twice)
    });
    let sine = |x: f32| x.sin() * 2.0;
    assert_eq!(values, [1.0, 2.0].map(|x| sine(x) * sine(x) + sine(x)));
    assert_eq!(ran.lock().expect("nobody panics").len(), 1);
}

#[test]
fn a_loader_thread_that_reads_computes_it_there_and_others_get_the_same() {
    let device = Default::default();
    let ran = Ran::default();
    let (tensor, indices, sum, found) = on_loader_thread(|| {
        let noise = T::random([64], Distribution::Uniform(1.0, 2.0), &device);
        let noise = noted_sine(noise, &ran);
        let (sorted, indices) = noise.clone().sort_with_indices(0);
        let sum = noise.clone().sum().into_scalar();
        assert_eq!(ran.lock().expect("nobody panics").len(), 1);
        let found = noise.clone().greater_elem(2.0).argwhere();
        assert_eq!(found.dims(), [0, 1]);
        drop(sorted);
        (noise, indices, sum, found)
    });
    assert_eq!(found.into_data().shape.as_slice(), [0, 1]);
    let sorted = tensor.clone().select(0, indices);
    assert_eq!(tensor.clone().sum().into_scalar(), sum, "no other numbers were drawn");
    assert_eq!(floats(sorted), floats(tensor.sort(0)));
    assert_eq!(ran.lock().expect("nobody panics").len(), 1, "it was computed once");
}

#[test]
fn every_kind_of_tensor_can_be_read_on_a_loader_thread_and_elsewhere() {
    let device = Default::default();
    let (ints, bools, read) = on_loader_thread(|| {
        let ints = Tensor::<B, 1, Int>::from_data([3, 1, 2], &device) * 2;
        let bools: Tensor<B, 1, Bool> = ints.clone().greater_elem(3);
        let read = (ints.to_data(), bools.to_data());
        (ints, bools, read)
    });
    assert_eq!((ints.into_data(), bools.into_data()), read);
    assert_eq!(read.0.to_vec::<i32>().expect("integers"), [6, 2, 4]);
    assert_eq!(read.1.to_vec::<bool>().expect("flags"), [true, false, true]);
}

#[test]
fn long_chains_need_no_stack() {
    let chain = || {
        let start = T::from_floats([0.0], &Default::default());
        (0..50_000).fold(start, |sum, _| sum + 1.0)
    };
    assert_eq!(floats(on_loader_thread(chain)), [50_000.0]);
    drop(on_loader_thread(chain));
    assert_eq!(on_loader_thread(|| floats(chain())), [50_000.0]);
}

#[test]
fn an_operation_in_place_stays_one() {
    // The backend finds itself the only owner wherever it would be without the decorator.
    let address = |tensor: T| {
        let owners = Arc::new(Mutex::new(Vec::new()));
        let (seen, tensor) = (owners.clone(), tensor.into_primitive().tensor());
        let form = (tensor.shape(), tensor.dtype());
        let op = CustomOp::new("is_alone").call::<Flex, _, _>(tensor, form, move |tensor| {
            seen.lock().expect("nobody panics").push(tensor.is_unique());
            tensor
        });
        (T::from_primitive(TensorPrimitive::Float(op)), owners)
    };
    let make = || T::from_floats([1.0, 2.0], &Default::default()) + 1.0;
    let (alone, owners) = on_loader_thread(|| address(make()));
    assert_eq!(floats(alone), [2.0, 3.0]);
    assert_eq!(*owners.lock().expect("nobody panics"), [true]);
    let (shared, owners, _kept) = on_loader_thread(|| {
        let kept = make();
        let (shared, owners) = address(kept.clone());
        (shared, owners, kept)
    });
    assert_eq!(floats(shared), [2.0, 3.0]);
    assert_eq!(*owners.lock().expect("nobody panics"), [false]);
}

#[test]
fn an_operation_that_panics_does_so_where_it_is_needed_and_again() {
    let tensor = on_loader_thread(|| {
        let tensor = T::from_floats([1.0], &Default::default()).into_primitive().tensor();
        let form = (tensor.shape(), tensor.dtype());
        let op = CustomOp::new("fails")
            .call::<Flex, _, firebox_lazy::LazyTensor<Flex, firebox_lazy::Float>>(
                tensor,
                form,
                |_| panic!("no result"),
            );
        T::from_primitive(TensorPrimitive::Float(op)) + 1.0
    });
    let message = |tensor: T| {
        let panic = catch_unwind(AssertUnwindSafe(|| floats(tensor))).expect_err("it panics");
        panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .unwrap_or_else(|| panic.downcast_ref::<String>().expect("a message").clone())
    };
    assert_eq!(message(tensor.clone()), "no result");
    assert!(message(tensor).contains("after that recording failed"));
    assert_eq!(floats(T::from_floats([1.0], &Default::default())), [1.0], "others go on");
}

#[test]
fn wrong_shapes_are_found_where_they_are_asked_for() {
    let mistake = on_loader_thread(|| {
        let ones = |size| T::ones([size], &Default::default());
        catch_unwind(AssertUnwindSafe(|| ones(2).reshape([3]))).is_err()
    });
    assert!(mistake);
    assert_eq!(on_loader_thread(|| floats(T::ones([2], &Default::default()))), [1.0; 2]);
}

#[test]
fn a_recording_on_a_loader_thread_is_one_like_others() {
    let sum = on_loader_thread(|| {
        let tensor = T::from_floats([1.0, 2.0], &Default::default());
        let recording = StepRecorder::new().record::<Flex, _>(|| tensor.clone().exp().sum());
        let recording = recording.expect("records");
        assert_eq!(recording.trace().calls().count(), 2);
        recording.run().into_scalar()
    });
    assert_eq!(sum, 1f32.exp() + 2f32.exp());
}
