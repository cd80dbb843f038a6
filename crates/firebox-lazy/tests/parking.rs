//! Parked tensors: their device memory is free, and nobody can tell otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::Flex;
use burn::backend::flex::FlexDevice;
use burn::tensor::{Tensor, TensorData};
use firebox_lazy::{Lazy, Parked, Recording, StepRecorder, park_uploads};
use firebox_trace::{Category, Step};

type L = Lazy<Flex>;
type T = Tensor<L, 1>;

static PLACES: AtomicUsize = AtomicUsize::new(0);

/// A place that counts itself.
struct Place(TensorData);

impl Place {
    fn of(data: TensorData) -> Arc<dyn Parked> {
        PLACES.fetch_add(1, Relaxed);
        Arc::new(Self(data))
    }
}

impl Parked for Place {
    fn fetch(self: Arc<Self>) -> TensorData {
        self.0.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        PLACES.fetch_sub(1, Relaxed);
    }
}

fn floats(values: &[f32]) -> T {
    T::from_floats(values, &FlexDevice)
}

fn values(tensor: &T) -> Vec<f32> {
    tensor.clone().into_data().to_vec().expect("floats")
}

fn record<R>(program: impl FnOnce() -> R) -> Recording<Flex, R> {
    StepRecorder::new().record(program).expect("it is recorded")
}

/// Runs a recording with all that it makes parked.
fn parked<R>(mut recording: Recording<Flex, R>) -> R {
    recording.park(&recording.survivors(), Place::of);
    recording.run()
}

fn steps<R>(recording: &Recording<Flex, R>) -> String {
    let names: Vec<&str> = recording.trace().steps.iter().map(Step::name).collect();
    names.join(" ")
}

/// One test, because the places of all tensors are counted.
#[test]
fn a_parked_tensor_is_what_it_was() {
    let (gradient, weight) = (floats(&[0.5, -1.5]), floats(&[1.0, 2.0]));
    // The first step of an optimizer with momentum.
    let mut recording = record(|| {
        let velocity = gradient.clone() * 0.9;
        (weight.clone() - velocity.clone() * 0.1, velocity)
    });
    let velocity = recording.survivors()[0];
    recording.park(&[velocity], Place::of);
    let (weight, velocity) = recording.run();
    assert_eq!(PLACES.load(Relaxed), 1);
    assert_eq!(values(&weight), [1.0 - 0.5 * 0.9 * 0.1, 2.0 + 1.5 * 0.9 * 0.1]);
    assert_eq!(values(&velocity), [0.5 * 0.9, -1.5 * 0.9]);
    assert_eq!(velocity.dims(), [2]);

    // A recording that is thrown away leaves it alone.
    let rehearsal = record(|| velocity.clone() + 1.0);
    assert_eq!(steps(&rehearsal), "upload float_add_scalar");
    let upload = rehearsal.trace().tensor(firebox_trace::TensorIndex(0));
    let label = upload.label.as_ref().expect("it is labelled");
    assert_eq!(label.category, Category::OptimizerState);
    assert_eq!(rehearsal.inputs(), []);
    rehearsal.discard();
    assert_eq!((PLACES.load(Relaxed), values(&velocity)), (1, vec![0.5 * 0.9, -1.5 * 0.9]));

    // The next step takes it, and another owner still has the old one.
    let old = velocity.clone();
    let recording = record(|| velocity * 0.9 + gradient.clone());
    assert_eq!(steps(&recording), "upload float_mul_scalar float_add");
    let velocity = parked(recording);
    assert_eq!(values(&old), [0.5 * 0.9, -1.5 * 0.9]);
    drop(old);
    assert_eq!(PLACES.load(Relaxed), 1);
    let expected = [0.5f32 * 0.9 * 0.9 + 0.5, -1.5f32 * 0.9 * 0.9 - 1.5];
    assert_eq!(values(&velocity), expected);

    // Without another owner its place is given up at the first use.
    let velocity = parked(record(|| velocity * 2.0));
    assert_eq!(PLACES.load(Relaxed), 1);
    // A read in the middle of a recording, of a parked tensor and of a new one.
    let recording = record(|| {
        let sum = (velocity.clone() + 1.0).sum();
        let read = (values(&velocity)[0], sum.clone().into_scalar());
        (sum * 2.0, read)
    });
    let (sum, (parked_value, total)) = parked(recording);
    assert_eq!(parked_value, expected[0] * 2.0);
    assert_eq!(values(&sum), [total * 2.0]);
    drop(sum);

    // Outside of a recording it is used like any other, and stays parked.
    assert_eq!(values(&(velocity.clone() * 0.5)), expected);
    assert_eq!(PLACES.load(Relaxed), 1);
    drop(velocity);
    assert_eq!(PLACES.load(Relaxed), 0);

    // What is loaded may be parked at once.
    let loaded = park_uploads(Place::of, || floats(&[3.0]));
    assert_eq!((PLACES.load(Relaxed), values(&loaded)), (1, vec![3.0]));
    assert_eq!(values(&floats(&[4.0])), [4.0]);
    assert_eq!(PLACES.load(Relaxed), 1);
}
