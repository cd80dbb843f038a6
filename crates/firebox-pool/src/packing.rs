//! Finds a page size and a [`Fit`] for a known sequence of buffers. The dry device calls it with
//! the lifetimes it measured; the real pool then places the same sequence on a page of that size.

use crate::pool::Lifetime;
use crate::region::Region;
use crate::space::{Fit, Space};
use crate::unroll::{Loop, unroll};

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

/// The smallest page found for a sequence of buffers.
///
/// Places are chosen as each buffer is requested, without knowledge of later requests, so the
/// result also holds where a run departs from the sequence, as far as the page has room.
/// [`Fit::TwoEnded`] is chosen only where it needs less than [`Fit::Best`].
///
/// The page size is a multiple of `alignment` if the sizes of the buffers are.
///
/// ```
/// use firebox_pool::{Fit, Region, Sequence, pack};
///
/// assert_eq!(pack(&Sequence::of(&[], Region::Step, &[], &[]), 256).page, 0);
/// ```
pub fn pack(sequence: &Sequence, alignment: u64) -> Packing {
    let least = sequence.most_in_use();
    let page = sequence.place(u64::MAX, Fit::Best).expect("the page has no end");
    let mut found = Packing { page, fit: Fit::Best };
    let step = (least / PRECISION).next_multiple_of(alignment.max(1)).max(alignment);
    for from in thresholds(&sequence.sizes) {
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
fn thresholds(sizes: &[u64]) -> Vec<u64> {
    let mut sizes = sizes.to_vec();
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

/// The requests and frees of one region in their order, of which the last part may repeat.
///
/// Where a buffer lies that outlives a training iteration differs from iteration to iteration, and
/// so do the places of all buffers of the next one. A page that had room for two iterations may
/// have none for the third. The last iteration is therefore repeated until the buffers that outlive
/// it lie where they lay before.
#[derive(Clone, Debug)]
pub struct Sequence {
    sizes: Vec<u64>,
    /// In order. What is freed before a request comes before it.
    events: Vec<Event>,
    /// The part that repeats, and how many events end with it. What follows comes once.
    repeats: Option<(usize, Unit)>,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    is_new: bool,
    buffer: usize,
}

/// A part of a sequence that repeats.
#[derive(Clone, Debug)]
struct Unit {
    /// The first buffer of the part, and how many it has. The part before it has as many, with the
    /// same sizes.
    first: usize,
    count: usize,
    /// In order, as those of the sequence.
    events: Vec<UnitEvent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct UnitEvent {
    /// Counted from the beginning of the part.
    request: usize,
    is_new: bool,
    /// The buffer, counted from the first of its part.
    buffer: usize,
    /// How many parts before this one the buffer was made.
    age: usize,
}

/// A sequence is repeated at most this many times.
const MOST_REPEATS: usize = 32;

impl Sequence {
    /// The buffers of `region` among `lifetimes`, which are in the order requested, with `loops`
    /// unrolled (see [`Loop`]).
    ///
    /// `units` has the numbers of the last requests of consecutive parts. If the last two parts
    /// made the same requests, the last one repeats. What the part before it left ends in a
    /// repetition where it ended in the last part, or with that part if it was still in use then.
    pub fn of(lifetimes: &[Lifetime], region: Region, units: &[u32], loops: &[Loop]) -> Self {
        let (buffers, units) = only(lifetimes, region, units, loops);
        let sizes: Vec<u64> = buffers.iter().map(|buffer| buffer.place.size).collect();
        let ends: Vec<Option<usize>> =
            buffers.iter().map(|buffer| buffer.end.map(|end| end as usize)).collect();
        let begins = (0..buffers.len()).map(|buffer| (buffer + 1, true, buffer));
        let frees = ends.iter().enumerate();
        let frees = frees.filter_map(|(buffer, end)| Some(((*end)?, false, buffer)));
        let mut events: Vec<(usize, bool, usize)> = begins.chain(frees).collect();
        events.sort_unstable();
        let last = units.last().copied().unwrap_or(usize::MAX);
        let split = events.partition_point(|(request, ..)| *request <= last);
        let events = events.into_iter().map(|(_, is_new, buffer)| Event { is_new, buffer });
        let repeats = Unit::of(&sizes, &ends, &units).map(|unit| (split, unit));
        Self { events: events.collect(), sizes, repeats }
    }

    /// The bytes in use at the peak, which no placement can do without.
    pub fn most_in_use(&self) -> u64 {
        let (mut now, mut most) = (0, 0);
        for event in &self.events {
            let size = self.sizes[event.buffer];
            if event.is_new {
                now += size;
                most = most.max(now);
            } else {
                now -= size;
            }
        }
        most
    }

    /// Places all buffers on a page of `page` bytes, and those of the part that repeats again and
    /// again. The bytes used from the start of the page, or `None` if a buffer found no room.
    pub fn place(&self, page: u64, fit: Fit) -> Option<u64> {
        let mut space = Space::new(page, fit);
        let mut offsets = vec![0; self.sizes.len()];
        let (split, unit) = match &self.repeats {
            None => (self.events.len(), None),
            Some((split, unit)) => (*split, Some(unit)),
        };
        let (before, behind) = self.events.split_at(split);
        self.run(before, &mut offsets, &mut space)?;
        let mut high = 0;
        if let Some(unit) = unit {
            let mut repeated = space.clone();
            unit.repeat(&self.sizes, &offsets, &mut repeated)?;
            high = repeated.high();
        }
        self.run(behind, &mut offsets, &mut space)?;
        Some(space.high().max(high))
    }

    fn run(&self, events: &[Event], offsets: &mut [u64], space: &mut Space) -> Option<()> {
        for event in events {
            let size = self.sizes[event.buffer];
            if event.is_new {
                offsets[event.buffer] = space.take(size)?;
            } else {
                space.give(offsets[event.buffer], size);
            }
        }
        Some(())
    }
}

/// The buffers of `region`, and `units`, with `loops` unrolled. Only the requests of the region are
/// counted, so that parts repeat that differ in others.
fn only(
    lifetimes: &[Lifetime],
    region: Region,
    units: &[u32],
    loops: &[Loop],
) -> (Vec<Lifetime>, Vec<usize>) {
    let buffers = lifetimes.iter().filter(|lifetime| lifetime.region == region);
    let buffers: Vec<Lifetime> = buffers.copied().collect();
    let made_by = |request: u32| buffers.partition_point(|buffer| buffer.begin <= request) as u32;
    let units: Vec<u32> = units.iter().map(|request| made_by(*request)).collect();
    let loops = loops.iter().map(|one| Loop {
        first: made_by(one.first),
        from: made_by(one.from),
        middle: made_by(one.middle),
        to: made_by(one.to),
        times: one.times,
    });
    let loops: Vec<Loop> = loops.collect();
    let renumbered = buffers.iter().zip(1..).map(|(buffer, begin)| {
        let end = buffer.end.map(|end| made_by(end - 1) + 1);
        Lifetime { begin, end, ..*buffer }
    });
    let renumbered: Vec<Lifetime> = renumbered.collect();
    let (buffers, units) = unroll(&renumbered, &units, &loops);
    (buffers, units.into_iter().map(|unit| unit as usize).collect())
}

impl Unit {
    /// The last part of a sequence, if the part before it made the same requests. `ends` are the
    /// first requests after buffers were freed, and `units` the last requests of parts.
    fn of(sizes: &[u64], ends: &[Option<usize>], units: &[usize]) -> Option<Self> {
        let [.., from, middle, to] = *units else { return None };
        if sizes[from..middle] != sizes[middle..to] {
            return None;
        }
        let mut events = Vec::new();
        for buffer in 0..to - middle {
            events.push(UnitEvent { request: buffer + 1, is_new: true, buffer, age: 0 });
            let (request, age) = match (ends[middle + buffer], ends[from + buffer]) {
                (Some(end), _) if end <= to => (end - middle, 0),
                (_, Some(end)) if end > middle && end <= to => (end - middle, 1),
                _ => (1, 2),
            };
            events.push(UnitEvent { request, is_new: false, buffer, age });
        }
        events.sort_unstable();
        Some(Self { first: middle, count: to - middle, events })
    }

    /// Repeats the part until the buffers that outlive it lie where they lay before. `sizes` and
    /// `offsets` are those of the whole sequence. `None` if a buffer found no room.
    fn repeat(&self, sizes: &[u64], offsets: &[u64], space: &mut Space) -> Option<()> {
        let (first, count) = (self.first, self.count);
        let sizes = &sizes[first..first + count];
        // The offsets of the part before the latest, and of the latest.
        let mut earlier = offsets[first - count..first].to_vec();
        let mut latest = offsets[first..first + count].to_vec();
        let mut seen = Vec::new();
        for _ in 0..MOST_REPEATS {
            let outlives = self.events.iter().filter(|event| event.age > 0);
            let state: Vec<[u64; 2]> = outlives
                .map(|event| match event.age {
                    1 => [latest[event.buffer], 0],
                    _ => [latest[event.buffer], earlier[event.buffer]],
                })
                .collect();
            if seen.contains(&state) {
                return Some(());
            }
            seen.push(state);
            let mut now = vec![0; count];
            for event in &self.events {
                let (size, at) = (sizes[event.buffer], event.buffer);
                match (event.is_new, event.age) {
                    (true, _) => now[at] = space.take(size)?,
                    (false, 0) => space.give(now[at], size),
                    (false, 1) => space.give(latest[at], size),
                    (false, _) => space.give(earlier[at], size),
                }
            }
            (earlier, latest) = (latest, now);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pool::{PageId, Place};

    fn lifetime(size: u64, begin: u32, end: Option<u32>) -> Lifetime {
        let place = Place { page: PageId(0), offset: 0, size };
        Lifetime { region: Region::Step, place, begin, end }
    }

    #[test]
    fn small_buffers_do_not_split_the_gaps_of_large_ones() {
        // A small buffer that stays takes the gap of a large one, which then has no room.
        let buffers = [
            lifetime(100, 1, Some(3)),
            lifetime(10, 2, Some(8)),
            lifetime(20, 3, None),
            lifetime(100, 4, None),
        ];
        let sequence = Sequence::of(&buffers, Region::Step, &[], &[]);
        assert_eq!(sequence.place(u64::MAX, Fit::Best), Some(210));
        let packing = pack(&sequence, 1);
        assert_eq!(packing, Packing { page: 130, fit: Fit::TwoEnded { from: 20 } });
    }

    /// Two parts of three requests: a batch, a large buffer, and an output that is freed when the
    /// next part but one begins.
    fn iterations(batch: u64) -> Vec<Lifetime> {
        vec![
            lifetime(batch, 1, Some(4)),
            lifetime(100, 2, Some(3)),
            lifetime(10, 3, None),
            lifetime(batch, 4, None),
            lifetime(100, 5, Some(6)),
            lifetime(10, 6, None),
        ]
    }

    #[test]
    fn the_last_part_repeats_until_what_outlives_it_lies_where_it_lay() {
        // By hand: the same requests ten times, with the lifetimes that repetition gives them.
        let long = (0..10).flat_map(|part| {
            let at = 3 * part;
            [
                lifetime(20, at + 1, Some(at + 4)),
                lifetime(100, at + 2, Some(at + 3)),
                lifetime(10, at + 3, Some(at + 7)),
            ]
        });
        let long: Vec<Lifetime> = long.collect();
        let twice = Sequence::of(&iterations(20), Region::Step, &[], &[]);
        let repeated = Sequence::of(&iterations(20), Region::Step, &[0, 3, 6], &[]);
        let by_hand = Sequence::of(&long, Region::Step, &[], &[]);
        let best = |sequence: &Sequence| sequence.place(u64::MAX, Fit::Best);
        assert_eq!(best(&repeated), best(&by_hand));
        assert!(best(&twice) < best(&repeated), "{:?} {:?}", best(&twice), best(&repeated));
        let packing = pack(&repeated, 1);
        assert!(by_hand.place(packing.page, packing.fit).is_some());
    }

    #[test]
    fn what_comes_after_the_part_that_repeats_is_placed_once() {
        let mut buffers = iterations(20);
        buffers.extend([lifetime(1000, 7, Some(8)), lifetime(10, 8, None)]);
        let best = |buffers: &[Lifetime], units: &[u32]| {
            Sequence::of(buffers, Region::Step, units, &[]).place(u64::MAX, Fit::Best)
        };
        let repeated = best(&buffers, &[0, 3, 6]);
        assert!(repeated >= best(&buffers, &[]) && repeated >= Some(1000), "{repeated:?}");
        buffers.truncate(6);
        assert!(best(&buffers, &[0, 3, 6]) < repeated);
        // A buffer that one part freed and the next did not.
        buffers[2].end = Some(4);
        assert!(best(&buffers, &[0, 3, 6]).is_some());
        buffers[1].end = Some(3);
        buffers[4].end = None;
        assert!(best(&buffers, &[0, 3, 6]).is_some());
    }

    #[test]
    fn a_part_unlike_the_one_before_it_does_not_repeat() {
        let mut buffers = iterations(20);
        // Another region does not count.
        buffers.push(Lifetime { region: Region::Lasting, ..lifetime(5, 7, None) });
        assert!(Sequence::of(&buffers, Region::Step, &[0, 3, 7], &[]).repeats.is_some());
        buffers[4].place.size = 101;
        assert!(Sequence::of(&buffers, Region::Step, &[0, 3, 7], &[]).repeats.is_none());
        assert!(Sequence::of(&iterations(20), Region::Step, &[3, 6], &[]).repeats.is_none());
    }

    #[test]
    fn a_loop_repeats_whatever_other_regions_do() {
        let mut buffers = iterations(20);
        let one = Loop { first: 0, from: 0, middle: 3, to: 6, times: 4 };
        let unrolled = Sequence::of(&buffers, Region::Step, &[], &[one]);
        assert_eq!(unrolled.sizes.len(), 6 + 4 * 3);
        // One more request in the second part.
        buffers.push(Lifetime { region: Region::Small, ..lifetime(5, 7, None) });
        let one = Loop { to: 7, ..one };
        let same = Sequence::of(&buffers, Region::Step, &[], &[one]);
        assert_eq!(same.sizes, unrolled.sizes);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_page_has_room_and_is_no_larger_than_that_of_best_fit(
            requests in prop::collection::vec((1u64..64, 1u32..40), 1..200),
        ) {
            let lifetimes = requests.iter().enumerate().map(|(at, (size, life))| {
                let begin = at as u32 + 1;
                let end = begin + life;
                lifetime(size * 256, begin, (end as usize <= requests.len()).then_some(end))
            });
            let buffers: Vec<Lifetime> = lifetimes.collect();
            let sequence = Sequence::of(&buffers, Region::Step, &[], &[]);
            let best = sequence.place(u64::MAX, Fit::Best).expect("it has no end");
            let packing = pack(&sequence, 256);
            prop_assert!(packing.page <= best && packing.page >= sequence.most_in_use());
            prop_assert!(packing.page.is_multiple_of(256));
            prop_assert!(sequence.place(packing.page, packing.fit).is_some());
        }
    }
}
