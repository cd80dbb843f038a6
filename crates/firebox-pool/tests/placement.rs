//! A million random requests against a checker that shares no code with the pool.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use firebox_pool::{Fit, Holder, Lifted, Place, Pool, Region, Space};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

const ALIGNMENT: u64 = 32;

#[derive(Clone)]
struct Held(Rc<Cell<bool>>);

impl Holder for Held {
    fn is_free(&self) -> bool {
        !self.0.get()
    }
}

#[derive(Clone, Copy, Debug)]
enum Request {
    /// Allocates a buffer of `size` bytes in one of the regions.
    Buffer { size: u64, region: usize },
    /// Frees one of the live buffers.
    Free { which: usize },
    /// Takes the buffers of a region off their pages and places them again.
    Lift { region: usize },
    /// Moves the buffers of a region to a page of another size, to their old offsets where those
    /// are free.
    Grow { region: usize, size: u64 },
    /// Closes the pages without buffers.
    Close,
}

fn request() -> impl Strategy<Value = Request> {
    let size = prop_oneof![1..200u64, 1..5_000u64, 60_000..300_000u64];
    prop_oneof![
        20 => (size, 0..Region::ALL.len()).prop_map(|(size, region)| Request::Buffer { size, region }),
        19 => any::<usize>().prop_map(|which| Request::Free { which }),
        1 => (0..Region::ALL.len()).prop_map(|region| Request::Lift { region }),
        1 => (0..Region::ALL.len(), 1..3_000_000u64)
            .prop_map(|(region, size)| Request::Grow { region, size }),
        1 => Just(Request::Close),
    ]
}

/// What the checker knows: the pages and the live buffers.
#[derive(Default)]
struct Checker {
    pages: BTreeMap<String, u64>,
    alive: Vec<(u64, u64, Held, Place)>,
}

impl Checker {
    /// Checks that every buffer is inside its page, aligned and large enough, and that no two
    /// overlap.
    fn check(&self) {
        let mut places: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
        for (_, size, _, place) in &self.alive {
            assert!(place.size >= *size && place.offset.is_multiple_of(ALIGNMENT), "{place:?}");
            let page = format!("{:?}", place.page);
            let end = place.offset + place.size;
            assert!(end <= self.pages[&page], "{place:?} is not inside of its page");
            places.entry(page).or_default().push((place.offset, end));
        }
        for mut of_page in places.into_values() {
            of_page.sort_unstable();
            assert!(of_page.is_sorted_by(|one, next| one.1 <= next.0), "two buffers overlap");
        }
    }
}

/// Places a buffer, on a new page if no page has room.
fn placed(
    pool: &mut Pool<Held>,
    checker: &mut Checker,
    id: u64,
    held: Held,
    size: u64,
    region: Region,
) -> Place {
    pool.place(id, held, size, region).unwrap_or_else(|(held, needed)| {
        let page = pool.open(needed.region, needed.size);
        checker.pages.insert(format!("{page:?}"), needed.size);
        pool.place(id, held, size, region).ok().expect("a page was opened")
    })
}

/// Runs the requests and checks the state at every `every`-th one.
fn run(requests: &[Request], fit: Fit, every: usize) -> Vec<Place> {
    let mut pool = Pool::new(ALIGNMENT, fit);
    let mut checker = Checker::default();
    let mut given = Vec::new();
    for (id, request) in requests.iter().enumerate() {
        match *request {
            Request::Buffer { size, region } => {
                pool.collect();
                let held = Held(Rc::new(Cell::new(true)));
                let place = placed(
                    &mut pool,
                    &mut checker,
                    id as u64,
                    held.clone(),
                    size,
                    Region::ALL[region],
                );
                checker.alive.push((id as u64, size, held, place));
                given.push(place);
            }
            Request::Free { which } if !checker.alive.is_empty() => {
                let (.., held, _) = checker.alive.swap_remove(which % checker.alive.len());
                held.0.set(false);
            }
            Request::Free { .. } => {}
            Request::Lift { region } => {
                let region = Region::ALL[region];
                for lifted in pool.lift(&[region]) {
                    // In a different order, the buffers may not fit on the pages they were on.
                    let Lifted { id, holder, place, .. } = lifted;
                    let place = placed(&mut pool, &mut checker, id, holder, place.size, region);
                    let moved = checker.alive.iter_mut().find(|alive| alive.0 == id);
                    moved.expect("it is alive").3 = place;
                }
            }
            Request::Grow { region, size } => {
                let region = Region::ALL[region];
                let lifted = pool.lift(&[region]);
                let size = size.next_multiple_of(ALIGNMENT);
                let page = pool.open(region, size);
                checker.pages.insert(format!("{page:?}"), size);
                for lifted in lifted {
                    let (id, before) = (lifted.id, lifted.place);
                    let place = match pool.place_at(page, lifted) {
                        Ok(place) => {
                            assert_eq!((place.offset, place.size), (before.offset, before.size));
                            place
                        }
                        Err(Lifted { id, holder, place, .. }) => {
                            placed(&mut pool, &mut checker, id, holder, place.size, region)
                        }
                    };
                    let moved = checker.alive.iter_mut().find(|alive| alive.0 == id);
                    moved.expect("it is alive").3 = place;
                }
            }
            Request::Close => {
                for page in pool.close_empty(None) {
                    checker.pages.remove(&format!("{page:?}"));
                }
            }
        }
        if id % every == 0 {
            checker.check();
            let in_use: u64 = checker.alive.iter().map(|(.., place)| place.size).sum();
            pool.collect();
            assert_eq!(pool.memory().in_use, in_use);
            assert_eq!(pool.memory().reserved, checker.pages.values().sum::<u64>());
            for (id, .., place) in &checker.alive {
                assert_eq!(pool.find(*id), Some(*place));
            }
        }
    }
    checker.check();
    given
}

#[test]
fn no_two_buffers_share_a_place() {
    let config = Config { cases: 1_000, rng_seed: RngSeed::Fixed(7), ..Config::default() };
    let requests = proptest::collection::vec(request(), 1_000);
    let fits = prop_oneof![
        Just(Fit::Best),
        Just(Fit::Same),
        (1..100_000u64).prop_map(|from| Fit::TwoEnded { from }),
    ];
    let run = |(requests, fit): (Vec<Request>, Fit)| {
        run(&requests, fit, 64);
        Ok(())
    };
    TestRunner::new(config).run(&(requests, fits), run).expect("a million requests");
}

#[test]
fn the_same_requests_give_the_same_places() {
    let config = Config { cases: 20, rng_seed: RngSeed::Fixed(8), ..Config::default() };
    let requests = proptest::collection::vec(request(), 500);
    let run = |requests: Vec<Request>| {
        prop_assert_eq!(run(&requests, Fit::Best, 100), run(&requests, Fit::Best, 100));
        Ok(())
    };
    TestRunner::new(config).run(&requests, run).expect("they are the same");
}

#[test]
fn of_same_sizes_as_much_is_used_as_there_are_at_once() {
    const SIZES: [u64; 4] = [512, 1024, 1536, 81_920];
    let config = Config { cases: 200, rng_seed: RngSeed::Fixed(9), ..Config::default() };
    let requests = proptest::collection::vec((0..SIZES.len(), any::<bool>(), any::<usize>()), 500);
    let run = |requests: Vec<(usize, bool, usize)>| {
        let mut endless = Space::new(u64::MAX, Fit::Same);
        let (mut alive, mut most) = (vec![Vec::new(); SIZES.len()], [0; SIZES.len()]);
        // One buffer stays throughout, so the page never becomes empty and starts over.
        endless.take(256);
        for (kind, takes, which) in &requests {
            if *takes {
                alive[*kind].push(endless.take(SIZES[*kind]).expect("it is endless"));
                most[*kind] = alive[*kind].len().max(most[*kind]);
            } else if !alive[*kind].is_empty() {
                let which = which % alive[*kind].len();
                endless.give(alive[*kind].swap_remove(which), SIZES[*kind]);
            }
        }
        let needed =
            256 + most.iter().zip(SIZES).map(|(most, size)| *most as u64 * size).sum::<u64>();
        prop_assert_eq!(endless.high(), needed);
        // A page of that size has room in any order. This tests the peak count of each size, the
        // largest size first.
        let mut page = Space::new(needed, Fit::Same);
        page.take(256);
        for (most, size) in most.iter().zip(SIZES).rev() {
            let places: Vec<u64> = (0..*most).filter_map(|_| page.take(size)).collect();
            prop_assert_eq!(places.len(), *most);
            places.into_iter().for_each(|at| page.give(at, size));
        }
        Ok(())
    };
    TestRunner::new(config).run(&requests, run).expect("it follows from the sizes");
}
