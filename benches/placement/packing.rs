//! Finds a page size and a [`Fit`] for a known sequence of buffers.

use firebox_pool::{Fit, Lifetime, Region, Space};

/// How many values of [`Fit::TwoEnded::from`] are tried: quantiles of the sizes that occur.
const THRESHOLDS: usize = 8;

/// The search for a page size ends at this part of the bytes in use at the peak.
const PRECISION: u64 = 128;

/// A page on which a sequence of buffers has room, and how they are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The size of the page in bytes.
    pub page: u64,
    /// How places are chosen: [`Fit::Best`] or [`Fit::TwoEnded`].
    pub fit: Fit,
}

/// The smallest page found on which the buffers of `region` among `lifetimes` have room.
///
/// Places are chosen as each buffer is requested, without knowledge of later requests, so the
/// result also holds where a run departs from the sequence, as far as the page has room.
/// [`Fit::TwoEnded`] is chosen only where it needs less than [`Fit::Best`].
///
/// The page size is a multiple of `alignment` if the sizes of the buffers are.
pub fn pack(lifetimes: &[Lifetime], region: Region, alignment: u64) -> Packing {
    let buffers: Vec<Lifetime> =
        lifetimes.iter().filter(|lifetime| lifetime.region == region).copied().collect();
    let sequence = Sequence::of(&buffers);
    let least = sequence.most_in_use();
    let page = sequence.place(u64::MAX, Fit::Best).expect("the page has no end");
    let mut found = Packing { page, fit: Fit::Best };
    let step = (least / PRECISION).next_multiple_of(alignment.max(1)).max(alignment);
    for from in thresholds(&buffers) {
        let fit = Fit::TwoEnded { from };
        // Most thresholds are ruled out by this one attempt.
        if found.page < least + step || sequence.place(found.page - step, fit).is_none() {
            continue;
        }
        let (mut fits, mut fails) = ((found.page - least) / step - 1, None);
        while fails.map_or(0, |fails| fails + 1) < fits {
            let steps = (fails.map_or(0, |fails| fails + 1) + fits) / 2;
            match sequence.place(least + steps * step, fit) {
                Some(_) => fits = steps,
                None => fails = Some(steps),
            }
        }
        let page = (least + fits * step).min(found.page - step);
        if sequence.place(page, fit).is_some() {
            found = Packing { page, fit };
        }
    }
    found
}

/// Quantiles of the sizes that occur, without the smallest, which would leave nothing small.
fn thresholds(buffers: &[Lifetime]) -> Vec<u64> {
    let mut sizes: Vec<u64> = buffers.iter().map(|buffer| buffer.place.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let sizes = sizes.get(1..).unwrap_or_default();
    let quantile = |at: usize| sizes[(2 * at + 1) * sizes.len() / (2 * THRESHOLDS)];
    let mut thresholds: Vec<u64> = match sizes.len() {
        0..=THRESHOLDS => sizes.to_vec(),
        _ => (0..THRESHOLDS).map(quantile).collect(),
    };
    thresholds.dedup();
    thresholds
}

/// Requests and frees in their order.
struct Sequence<'a> {
    buffers: &'a [Lifetime],
    /// By request number: frees first, then the new buffer.
    events: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    request: u32,
    is_new: bool,
    buffer: usize,
}

impl<'a> Sequence<'a> {
    fn of(buffers: &'a [Lifetime]) -> Self {
        let begins = buffers.iter().enumerate();
        let begins = begins.map(|(buffer, lifetime)| Event {
            request: lifetime.begin,
            is_new: true,
            buffer,
        });
        let ends = buffers.iter().enumerate().filter_map(|(buffer, lifetime)| {
            Some(Event { request: lifetime.end?, is_new: false, buffer })
        });
        let mut events: Vec<Event> = begins.chain(ends).collect();
        events.sort_unstable();
        Self { buffers, events }
    }

    /// The bytes in use at the peak, which no placement can do without.
    fn most_in_use(&self) -> u64 {
        let (mut now, mut most) = (0, 0);
        for event in &self.events {
            let size = self.buffers[event.buffer].place.size;
            if event.is_new {
                now += size;
                most = most.max(now);
            } else {
                now -= size;
            }
        }
        most
    }

    /// Places all buffers on a page of `page` bytes. The bytes used from the start of the page, or
    /// `None` if a buffer found no room.
    fn place(&self, page: u64, fit: Fit) -> Option<u64> {
        let mut space = Space::new(page, fit);
        let mut offsets = vec![0; self.buffers.len()];
        for event in &self.events {
            let size = self.buffers[event.buffer].place.size;
            if event.is_new {
                offsets[event.buffer] = space.take(size)?;
            } else {
                space.give(offsets[event.buffer], size);
            }
        }
        Some(space.high())
    }
}
