//! What carries the ranks: a small trait, and the engine of a process on its own.

use std::collections::VecDeque;
use std::time::Duration;

use crate::error::RankError;

/// The longest message of a rank, in bytes.
pub(crate) const LONGEST: usize = 16 << 20;

/// What carries messages and sums between ranks.
///
/// All ranks call the same methods in the same order. After an error, an engine cannot be used any
/// more.
///
/// An engine that sums on the devices themselves, such as NCCL, would implement this trait too. It
/// was not built, because it could not be run.
pub trait Engine: Send {
    /// The number of this process among all, from zero.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn world(&self) -> usize;

    /// The number of this process among those on the same machine, and how many these are.
    fn local(&self) -> (usize, usize);

    /// Sends a message to all ranks. Returns the messages of all, in the order of the ranks.
    ///
    /// # Errors
    ///
    /// If a rank does not send its message in time, has ended, or sends something else.
    fn control(&mut self, word: Vec<u8>, patience: Duration) -> Result<Vec<Vec<u8>>, RankError>;

    /// Begins to sum numbers over all ranks, element by element. All ranks give equally many. The
    /// sums end in the order in which they began.
    ///
    /// # Errors
    ///
    /// If the engine has failed.
    fn begin_sum(&mut self, numbers: Vec<f32>) -> Result<(), RankError>;

    /// Waits for the sum that began first. All ranks get the same bits.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    fn end_sum(&mut self, patience: Duration) -> Result<Vec<f32>, RankError>;

    /// Sends bytes from rank 0 to all. Those of the others are not used.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    fn broadcast(&mut self, bytes: Vec<u8>, patience: Duration) -> Result<Vec<u8>, RankError>;
}

/// The engine of a process on its own: one rank, which is told what it says.
#[derive(Debug, Default)]
pub struct Alone {
    sums: VecDeque<Vec<f32>>,
}

impl Engine for Alone {
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
        self.sums.push_back(numbers);
        Ok(())
    }

    fn end_sum(&mut self, _: Duration) -> Result<Vec<f32>, RankError> {
        self.sums.pop_front().ok_or(RankError::Failed)
    }

    fn broadcast(&mut self, bytes: Vec<u8>, _: Duration) -> Result<Vec<u8>, RankError> {
        Ok(bytes)
    }
}
