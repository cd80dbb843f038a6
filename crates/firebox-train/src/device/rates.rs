//! How fast a device computes: as published for a card, or measured by a short run.

use std::time::{Duration, Instant};

use burn::tensor::{Distribution, Tensor};
use burn_backend::{Backend, ExecutionError};
#[cfg(feature = "cards")]
use firebox_dry::Card;
use firebox_recompute::Rates;

/// A run that takes this long is long enough to be timed.
const LONG: Duration = Duration::from_millis(4);

/// How often a run is timed. The shortest counts: others may have been disturbed.
const TIMES: usize = 5;

/// The largest square matrix, and the largest tensor in bytes.
const LARGEST_MATRIX: usize = 4096;
const LARGEST: usize = 64 << 20;

/// Columns of a matrix to which a column is added.
const COLUMNS: usize = 1024;

/// Measures how fast a device computes: products, reading and writing, the same where a column
/// is added to a matrix, exponentials, and how long a call takes that does nothing.
///
/// Takes half a second, on a GPU also the time in which kernels are compiled and tuned, and up to
/// 192 MiB of the device's memory for a moment. Nothing else should run meanwhile. The numbers
/// differ slightly from run to run, and choices with them: two runs of a program may compute other
/// tensors again. Hand them to
/// [`LearnerBuilder::rates`](crate::LearnerBuilder::rates).
///
/// # Errors
///
/// If the device fails.
///
/// ```
/// use burn::backend::Flex;
/// use firebox_train::measure_rates;
///
/// let rates = measure_rates::<Flex>(&Default::default())?;
/// println!("{:.0} Gflop/s, {:.0} GB/s", rates.flops / 1e9, rates.bandwidth / 1e9);
/// # Ok::<(), burn_backend::ExecutionError>(())
/// ```
pub fn measure_rates<B: Backend>(device: &B::Device) -> Result<Rates, ExecutionError> {
    let random = |shape: [usize; 2]| Tensor::<B, 2>::random(shape, Distribution::Default, device);
    let mut size = 256;
    let flops = loop {
        let (one, other) = (random([size, size]), random([size, size]));
        let time = shortest::<B, _>(device, || one.clone().matmul(other.clone()))?;
        if time >= LONG || size == LARGEST_MATRIX {
            break 2.0 * (size as f64).powi(3) / time.as_secs_f64();
        }
        size *= 2;
    };
    let bandwidth = |columns_of_other: usize| {
        let mut rows = 256;
        loop {
            let (one, other) = (random([rows, COLUMNS]), random([rows, columns_of_other]));
            let time = shortest::<B, _>(device, || one.clone() + other.clone())?;
            let bytes = [&one, &one, &other].map(|tensor| 4 * tensor.shape().num_elements());
            if time >= LONG || bytes[0] >= LARGEST {
                return Ok(bytes.iter().sum::<usize>() as f64 / time.as_secs_f64());
            }
            rows *= 2;
        }
    };
    let mut rows = 64;
    let function = loop {
        let numbers = random([rows, COLUMNS]);
        let time = shortest::<B, _>(device, || numbers.clone().exp())?;
        let count = rows * COLUMNS;
        if time >= LONG || 4 * count >= LARGEST {
            break time.as_secs_f64() / count as f64;
        }
        rows *= 2;
    };
    let tiny = random([1, 1]);
    const CALLS: u32 = 256;
    // Products of one element: backends that fuse operations would make one call of sums.
    let calls = || (0..CALLS).fold(tiny.clone(), |product, _| product.matmul(tiny.clone()));
    let launch = shortest::<B, _>(device, calls)?.as_secs_f64() / f64::from(CALLS);
    let (bandwidth, mixed_bandwidth) = (bandwidth(COLUMNS)?, bandwidth(1)?);
    Ok(Rates { flops, bandwidth, mixed_bandwidth, function, launch })
}

/// The shortest time in which something is computed.
fn shortest<B: Backend, T>(
    device: &B::Device,
    compute: impl Fn() -> T,
) -> Result<Duration, ExecutionError> {
    let mut least = Duration::MAX;
    // The first run compiles and tunes kernels.
    for run in 0..=TIMES {
        let started = Instant::now();
        let computed = compute();
        B::sync(device)?;
        if run > 0 {
            least = least.min(started.elapsed());
        }
        drop(computed);
    }
    Ok(least)
}

/// How fast a card computes, as published. None if that is not known.
#[cfg(feature = "cards")]
pub fn rates_of(card: &Card) -> Option<Rates> {
    let throughput = card.throughput()?;
    let giga = |count: u32| 1e9 * f64::from(count);
    Some(Rates::device(giga(throughput.gflops), giga(throughput.gigabytes)))
}
