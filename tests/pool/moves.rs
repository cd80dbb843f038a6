//! Tests buffers that are moved, that outlive training, that have no bytes, and that find no place.

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor};
use cubecl::stream_id::StreamId;
use cubecl::wgpu::WgpuRuntime;
use firebox_pool::{Control, Pages};

use crate::{alone, device};

type B = firebox::Vulkan;

/// Trains three steps and runs `between` after the first. Returns the weights.
fn trained(between: impl FnOnce()) -> Vec<f32> {
    type Training = Autodiff<B>;
    let device = device();
    <B as Backend>::seed(&device, 11);
    let mut model: Linear<Training> = LinearConfig::new(256, 300).init(&device);
    let mut optimizer = AdamConfig::new().init();
    let mut between = Some(between);
    for _ in 0..3 {
        let input = Tensor::<Training, 2>::random([64, 256], Distribution::Default, &device);
        let loss = model.forward(input).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
        B::sync(&device).expect("the device is healthy");
        if let Some(between) = between.take() {
            between();
        }
    }
    model.weight.val().into_data().to_vec().expect("they are floats")
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn values_stay_when_buffers_are_moved() {
    let _alone = alone();
    let still = trained(|| ());
    let moved = trained(|| {
        let control = Control::<WgpuRuntime>::of(&Default::default());
        control.begin(StreamId::current(), u64::MAX, u64::MAX);
        let pages =
            Pages { lasting: 3 << 20, step: 5 << 20, small: 1 << 20, beside: 0, step_from: 0 };
        control.prepare(pages).expect("there is memory");
        assert_eq!(control.memory().reserved, pages.total());
        // Moved once more, to pages of other sizes.
        let pages = Pages {
            lasting: 4 << 20,
            step: 2 << 20,
            small: 2 << 20,
            beside: 1 << 20,
            step_from: 1 << 18,
        };
        control.prepare(pages).expect("there is memory");
        assert_eq!(control.memory().reserved, pages.total());
    });
    Control::<WgpuRuntime>::of(&Default::default()).end();
    assert_eq!(still, moved);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn what_outlives_training_is_all_that_is_held_behind_it() {
    let _alone = alone();
    let device = device();
    let control = Control::<WgpuRuntime>::of(&device);
    let kept = Tensor::<B, 1, Int>::arange(0..100_000, &device).float();
    B::sync(&device).expect("the device is healthy");
    control.begin(StreamId::current(), u64::MAX, u64::MAX);
    control
        .prepare(Pages { lasting: 1 << 20, step: 8 << 20, ..Pages::default() })
        .expect("there is memory");
    let step = kept.clone().add_scalar(1.0).sum().into_scalar();
    assert_eq!(step, kept.clone().sum().into_scalar() + 100_000.0);
    control.end();
    B::memory_cleanup(&device);
    let memory = control.memory();
    assert!(memory.reserved <= 1 << 20, "{memory:?}");
    let last = kept.slice(99_999..100_000).into_scalar();
    assert_eq!(last, 99_999.0);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn empty_tensors_and_host_data() {
    let _alone = alone();
    let device = device();
    let empty = Tensor::<B, 2>::zeros([0, 4], &device);
    let joined = Tensor::cat(vec![empty.clone(), Tensor::<B, 2>::ones([2, 4], &device)], 0);
    assert_eq!(joined.sum().into_scalar(), 8.0);
    assert!(empty.into_data().bytes.is_empty());
    let numbers = Tensor::<B, 1, Int>::from_data([3, 1, 2], &device);
    assert_eq!(numbers.sort(0).into_data().to_vec::<i32>().expect("integers"), [1, 2, 3]);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn no_place_is_an_error_that_tells_the_sizes() {
    let _alone = alone();
    let device = device();
    let control = Control::<WgpuRuntime>::of(&device);
    control.begin(StreamId::current(), 4 << 20, u64::MAX);
    let refused = Tensor::<B, 1>::zeros([4 << 20], &device).add_scalar(1.0);
    let error = B::sync(&device).expect_err("16 MiB do not fit into 4").to_string();
    assert!(error.contains("16777216 bytes") && error.contains("4194304"), "{error}");
    // No other thread takes the error from the training thread, and nothing runs.
    let other = std::thread::spawn(move || B::sync(&Default::default()).is_err());
    assert!(other.join().expect("it asks"));
    let error = B::sync(&device).expect_err("it is still so").to_string();
    assert!(error.contains("16777216 bytes"), "{error}");
    // After training has ended, what fits runs.
    control.end();
    drop(refused);
    B::sync(&device).expect("nothing is wrong any more");
    let fits = Tensor::<B, 1>::ones([1 << 18], &device).sum().into_scalar();
    assert_eq!(fits, (1 << 18) as f32);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn pages_have_no_more_bytes_than_the_device_allows() {
    let _alone = alone();
    let still = trained(|| ());
    let moved = trained(|| {
        let control = Control::<WgpuRuntime>::of(&Default::default());
        control.begin(StreamId::current(), u64::MAX, 1 << 20);
        let pages =
            Pages { lasting: 5 << 19, step: 9 << 18, small: 1 << 20, beside: 0, step_from: 0 };
        control.prepare(pages).expect("there is memory");
        assert_eq!(control.memory().reserved, pages.total());
        // A full region takes another page, of the size of the buffer.
        let large = Tensor::<B, 1>::ones([1 << 20], &Default::default());
        assert_eq!(large.sum().into_scalar(), (1 << 20) as f32);
    });
    Control::<WgpuRuntime>::of(&Default::default()).end();
    assert_eq!(still, moved);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn small_buffers_that_lie_on_pages_for_others_move_with_them() {
    let _alone = alone();
    let device = device();
    let control = Control::<WgpuRuntime>::of(&device);
    control.begin(StreamId::current(), 5 << 20, u64::MAX);
    let pages = Pages { lasting: 0, step: 4 << 20, small: 64 << 10, beside: 0, step_from: 0 };
    control.prepare(pages).expect("there is memory");
    // More small buffers than their page has room for, and no room for another page.
    let small: Vec<_> =
        (0..20).map(|number| Tensor::<B, 1>::full([5_000], number as f32, &device)).collect();
    B::sync(&device).expect("they lie on the page of steps");
    assert_eq!(control.memory().reserved, pages.total());
    let larger = Pages { step: 4 << 20, small: 512 << 10, ..pages };
    control.prepare(larger).expect("there is memory");
    let shrunk = Pages { step: 3 << 20, ..larger };
    control.prepare(shrunk).expect("there is memory");
    assert_eq!(
        control.memory().reserved,
        shrunk.total(),
        "no page stays for a buffer of another region"
    );
    for (number, tensor) in small.into_iter().enumerate() {
        assert_eq!(tensor.sum().into_scalar(), 5_000.0 * number as f32);
    }
    control.end();
}
