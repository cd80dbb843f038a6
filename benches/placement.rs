//! Compares ways to place buffers on a page: online ones, which see one request after the other,
//! and offline ones, which know all requests in advance.
//!
//! The requests are those of four training iterations with Adam on a card without memory. Ratios
//! are relative to the bytes in use at the peak, which no placement can do without.
//!
//! `two-ended` is what the pool does: the threshold and the page size come from
//! [`firebox_pool::pack`]. The offline ways are those of TensorFlow Lite (Pisarchyk and Lee,
//! "Efficient memory management for deep neural net inference", 2020: by size and by breadth) and
//! of XLA (`GlobalDecreasingSizeBestFitHeap` in its heap simulator: by lifetime).

use std::cmp::Reverse;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::train::TrainStep;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use firebox::Lazy;
use firebox::dry::{Card, Cuda, Dry, DryCuda, DryPooledCuda, Lease};
use firebox_pool::{Fit, Holder, Lifetime, Pool, Region, Sequence, Space, pack};
use firebox_testing::bench;
use firebox_testing::zoo::iterations::{parts, record};
use firebox_testing::zoo::{self, Zoo};

/// Of buffers on CUDA, in bytes.
const ALIGNMENT: u64 = 512;

type B = Autodiff<Lazy<DryCuda>>;

const CARD: &str = "RTX 4090";

/// Ways to place the buffers of a page whose lifetimes are known.
const OFFLINE: [(&str, Order); 3] =
    [("by size", by_size), ("by lifetime", by_lifetime), ("by breadth", by_breadth)];

/// In which order buffers that are all known are given their places.
type Order = fn(&[Lifetime]) -> Vec<usize>;

fn main() {
    bench::print_machine();
    let card = Card::named(CARD).expect("it is in the table");
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["model", "requests", "in use", "MiB"].into_iter().chain(names()));
    let mut rows: Vec<Vec<f64>> = Vec::new();
    let mut requests = Vec::new();
    macro_rules! models {
        ($($model:ident: $items:expr, $micro:expr;)*) => {$(
            let found = lifetimes::<zoo::$model<B>>(&card, $items, $micro);
            let page = of_page(&found);
            let row = ratios(&page);
            let name = format!("{}-{}-by-{}", <zoo::$model<B> as Zoo<B>>::NAME, $items, $micro);
            let alive = most_alive(&page);
            let cells = [name, page.len().to_string(), most_at_once(&page).to_string(), (alive >> 20).to_string()];
            table.add_row(cells.into_iter().chain(row.iter().map(|ratio| format!("{ratio:.3}"))));
            rows.push(row);
            requests.push(found);
        )*};
    }
    models! {
        Mlp: 3_300, 3_300;
        Cnn: 310, 310;
        ResNet: 170, 170;
        UNet: 210, 210;
        Encoder: 220, 220;
        Gpt: 230, 230;
        Recurrent: 4_500, 4_500;
        Autoencoder: 610, 610;
        Siamese: 770, 770;
        Reader: 3_700, 3_700;
        Mlp: 7_000, 1_700;
        ResNet: 170, 57;
        UNet: 210, 70;
        Gpt: 230, 77;
    }
    table.column_iter_mut().skip(1).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    println!("\nbytes of the step page over the bytes in use at the peak, {CARD}\n{table}");
    print!("result: bench=placement");
    for (way, name) in names().enumerate() {
        let mut ratios: Vec<f64> = rows.iter().map(|row| row[way]).collect();
        ratios.sort_by(f64::total_cmp);
        let name = name.replace([' ', '-'], "_");
        let (median, worst) = (ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
        print!(" {name}={median:.3} {name}_worst={worst:.3}");
    }
    let requests = requests.last().expect("there are models");
    let started = Instant::now();
    black_box(pack(&Sequence::of(requests, Region::Step, &[], &[]), ALIGNMENT));
    let packing = started.elapsed();
    println!(
        " pack_ms={:.1} request_ns={}",
        packing.as_secs_f64() * 1e3,
        cost(requests).as_nanos()
    );
}

/// The names of all ways, in the order of the columns.
fn names() -> impl Iterator<Item = &'static str> {
    ["best", "two-ended"].into_iter().chain(OFFLINE.iter().map(|(name, _)| *name))
}

/// The buffers of two rounds of two iterations on a card.
fn lifetimes<M>(card: &Card, items: usize, micro: usize) -> Vec<Lifetime>
where
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let lease = Lease::<Cuda>::take(&card.properties()).expect("there are few cards");
    let starts = (0..items).step_by(micro);
    let parts = parts(starts.map(|start| micro.min(items - start)));
    let trace = record::<B, M>(items, &parts, lease.device());
    drop(lease);
    Dry::<DryPooledCuda>::new(card.properties()).lifetimes(&trace).expect("burn runs it").buffers
}

/// Those of the page of steps.
fn of_page(lifetimes: &[Lifetime]) -> Vec<Lifetime> {
    lifetimes.iter().filter(|lifetime| lifetime.region == Region::Step).copied().collect()
}

fn ratios(page: &[Lifetime]) -> Vec<f64> {
    let alive = most_alive(page) as f64;
    let packing = pack(&Sequence::of(page, Region::Step, &[], &[]), ALIGNMENT);
    let used = online(page, packing.fit, packing.page);
    assert!(used <= packing.page, "the buffers have room on the page that was found");
    let online = [online(page, Fit::Best, u64::MAX), packing.page];
    let offline = OFFLINE.iter().map(|(_, order)| offline(page, &order(page)));
    online.into_iter().chain(offline).map(|bytes| bytes as f64 / alive).collect()
}

/// What happens at a request: the buffers that are gone, then the one that is new.
fn events(page: &[Lifetime]) -> Vec<(u32, bool, usize)> {
    let begins = page.iter().enumerate().map(|(at, lifetime)| (lifetime.begin, true, at));
    let ends = page.iter().enumerate();
    let ends = ends.filter_map(|(at, lifetime)| Some((lifetime.end?, false, at)));
    let mut events: Vec<_> = begins.chain(ends).collect();
    events.sort_unstable();
    events
}

fn most_alive(page: &[Lifetime]) -> u64 {
    most(page, |lifetime| lifetime.place.size)
}

fn most_at_once(page: &[Lifetime]) -> u64 {
    most(page, |_| 1)
}

fn most(page: &[Lifetime], of: impl Fn(&Lifetime) -> u64) -> u64 {
    let (mut now, mut most) = (0, 0);
    for (_, begins, at) in events(page) {
        match begins {
            true => now += of(&page[at]),
            false => now -= of(&page[at]),
        }
        most = most.max(now);
    }
    most
}

/// The bytes that are used if each buffer is given a place when it is asked for.
fn online(page: &[Lifetime], fit: Fit, size: u64) -> u64 {
    let mut space = Space::new(size, fit);
    let mut offsets = vec![0; page.len()];
    for (_, begins, at) in events(page) {
        let size = page[at].place.size;
        match begins {
            true => offsets[at] = space.take(size).expect("there is room"),
            false => space.give(offsets[at], size),
        }
    }
    space.high()
}

/// The bytes used if buffers get their places in this order: each takes the smallest gap between
/// those that have a place and live at the same time.
fn offline(page: &[Lifetime], order: &[usize]) -> u64 {
    let mut placed: Vec<(u64, usize)> = Vec::new();
    let mut high = 0;
    for &at in order {
        let (mut end, mut best) = (0, None::<(u64, u64)>);
        for &(offset, other) in &placed {
            if !overlap(&page[at], &page[other]) {
                continue;
            }
            let gap = offset.saturating_sub(end);
            let fits = gap >= page[at].place.size;
            if fits && best.is_none_or(|(least, _)| gap < least) {
                best = Some((gap, end));
            }
            end = end.max(offset + page[other].place.size);
        }
        let offset = best.map_or(end, |(_, offset)| offset);
        high = high.max(offset + page[at].place.size);
        let behind = placed.partition_point(|other| *other < (offset, at));
        placed.insert(behind, (offset, at));
    }
    check(page, &placed);
    high
}

fn end(lifetime: &Lifetime) -> u32 {
    lifetime.end.unwrap_or(u32::MAX)
}

fn overlap(one: &Lifetime, other: &Lifetime) -> bool {
    one.begin < end(other) && other.begin < end(one)
}

/// No two buffers that live at the same time lie on each other.
fn check(page: &[Lifetime], placed: &[(u64, usize)]) {
    for (at, &(offset, one)) in placed.iter().enumerate() {
        let last = offset + page[one].place.size;
        for &(next, other) in placed[at + 1..].iter().take_while(|(next, _)| *next < last) {
            assert!(!overlap(&page[one], &page[other]), "two buffers at {next}");
        }
    }
}

fn by_size(page: &[Lifetime]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..page.len()).collect();
    order.sort_by_key(|at| Reverse(page[*at].place.size));
    order
}

fn by_lifetime(page: &[Lifetime]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..page.len()).collect();
    order.sort_by_key(|at| {
        let lifetime = &page[*at];
        Reverse((end(lifetime) - lifetime.begin, lifetime.place.size))
    });
    order
}

/// Those of the request at which most is alive, the largest first; then those of the next.
fn by_breadth(page: &[Lifetime]) -> Vec<usize> {
    let (mut now, mut breadths) = (0, vec![0; page.len()]);
    let mut alive: Vec<usize> = Vec::new();
    for (_, begins, at) in events(page) {
        match begins {
            true => {
                now += page[at].place.size;
                alive.push(at);
            }
            false => {
                now -= page[at].place.size;
                alive.retain(|other| *other != at);
            }
        }
        alive.iter().for_each(|at| breadths[*at] = now.max(breadths[*at]));
    }
    let mut order: Vec<usize> = (0..page.len()).collect();
    order.sort_by_key(|at| Reverse((breadths[*at], page[*at].place.size)));
    order
}

/// A buffer in [`cost`], by whether it is there.
struct Held<'a>(&'a std::cell::Cell<bool>);

impl Holder for Held<'_> {
    fn is_free(&self) -> bool {
        !self.0.get()
    }
}

/// What the pool takes for a request, looking for buffers that are gone included.
fn cost(lifetimes: &[Lifetime]) -> Duration {
    let is_there = vec![std::cell::Cell::new(false); lifetimes.len()];
    let events = events(lifetimes);
    let round = || {
        let mut pool = Pool::new(256, Fit::Best);
        for region in Region::ALL {
            pool.open(region, u64::MAX);
        }
        is_there.iter().for_each(|is_there| is_there.set(false));
        let started = Instant::now();
        for (_, begins, at) in &events {
            is_there[*at].set(*begins);
            if *begins {
                let Lifetime { region, place, .. } = &lifetimes[*at];
                pool.collect();
                let placed = pool.place(*at as u64, Held(&is_there[*at]), place.size, *region);
                black_box(placed.ok());
            }
        }
        started.elapsed() / lifetimes.len() as u32
    };
    let mut rounds: Vec<Duration> = (0..bench::rounds(9)).map(|_| round()).collect();
    rounds.sort_unstable();
    rounds[rounds.len() / 2]
}
