//! What a sum over ranks takes of the host's memory, against what is planned for it.

use std::collections::VecDeque;
use std::time::Duration;

use firebox_ranks::{BUCKET, Engine, RankError, Ranks, Summing, exchange_bytes};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Keeps what is sent while it is summed into another buffer, as MPI does.
#[derive(Default)]
struct Copies(VecDeque<Vec<f32>>);

impl Engine for Copies {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn local(&self) -> (usize, usize) {
        (0, 1)
    }

    fn control(&mut self, word: Vec<u8>, _: Duration) -> Result<Vec<Vec<u8>>, RankError> {
        Ok(vec![word])
    }

    fn begin_sum(&mut self, numbers: Vec<f32>) -> Result<(), RankError> {
        // The first is summed at once, and waits with its sum.
        self.0.push_back(numbers.clone());
        self.0.push_back(numbers);
        Ok(())
    }

    fn end_sum(&mut self, _: Duration) -> Result<Vec<f32>, RankError> {
        self.0.pop_front();
        self.0.pop_front().ok_or(RankError::Failed)
    }

    fn broadcast(&mut self, bytes: Vec<u8>, _: Duration) -> Result<Vec<u8>, RankError> {
        Ok(bytes)
    }
}

#[test]
fn a_sum_takes_no_more_than_is_planned() {
    let ranks = Ranks::new(Copies::default());
    for pieces in [
        vec![100],
        vec![70_000; 3],
        vec![BUCKET - 1, 5],
        vec![BUCKET / 3; 20],
        vec![3, 5 * BUCKET + 7, 1000, BUCKET],
        vec![3 * BUCKET / 2; 7],
    ] {
        let bytes = |numbers: usize| (numbers * size_of::<f32>()) as u64;
        let total: usize = pieces.iter().sum();
        let largest = pieces.iter().copied().max().unwrap_or_default();
        let planned = exchange_bytes(bytes(total), bytes(largest));
        HEAP.reset_peak_usage();
        let before = HEAP.current_usage();
        let mut summing = Summing::of(&ranks);
        let mut waiting: VecDeque<usize> = VecDeque::new();
        let take = |summing: &mut Summing<'_>, waiting: &mut VecDeque<usize>| {
            while waiting.front().is_some_and(|first| summing.take(*first).is_some()) {
                waiting.pop_front();
            }
        };
        for piece in &pieces {
            waiting.push_back(*piece);
            let numbers = vec![1.0; *piece];
            summing.give(&numbers).expect("there is nobody to wait for");
            take(&mut summing, &mut waiting);
        }
        summing.flush().expect("there is nobody to wait for");
        take(&mut summing, &mut waiting);
        assert!(waiting.is_empty());
        drop(summing);
        let taken = (HEAP.peak_usage() - before) as u64;
        println!("{total} numbers: {taken} bytes of {planned}");
        // A few words for the lists.
        assert!(taken <= planned + 4096, "{taken} bytes of {planned}, pieces {pieces:?}");
    }
}
