//! Why ranks cannot go on together.

use std::time::Duration;

/// Why the ranks of a training cannot go on together.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// Ranks did not answer in time.
    #[error(
        "{} did not answer within {} s: see whether a loader, a download or a debugger holds it up, or wait longer, as in \
         `.patience(..)`",
        list(missing), waited.as_secs()
    )]
    Missing {
        /// The ranks that did not answer.
        missing: Vec<usize>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// Ranks ended while others still train.
    #[error("{} ended while the others train: its own output says why", list(left))]
    Left {
        /// The ranks that ended.
        left: Vec<usize>,
    },
    /// A sum over all ranks did not end in time. Which rank is missing is not known.
    #[error(
        "a sum over the ranks did not end within {} s: one of them has stopped, or the network is slow; wait longer, \
         as in `.patience(..)`",
        waited.as_secs()
    )]
    Stuck {
        /// How long it was waited for.
        waited: Duration,
    },
    /// What a rank sent is not what was expected of it.
    #[error("{} sent something unexpected: {message}", list(&[*rank]))]
    Unexpected {
        /// The rank.
        rank: usize,
        /// What was wrong.
        message: String,
    },
    /// MPI cannot be started.
    #[error("MPI cannot be started: {0}")]
    NotStarted(String),
    /// The ranks have failed before, and cannot be used any more.
    #[error("the ranks have failed before, and cannot go on together")]
    Failed,
}

/// Names ranks: `rank 2`, or `ranks 2, 5 and 7`.
fn list(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_ranks() {
        let missing = RankError::Missing { missing: vec![2], waited: Duration::from_secs(30) };
        assert!(missing.to_string().starts_with("rank 2 did not answer within 30 s"));
        let left = RankError::Left { left: vec![1, 3, 4] };
        assert!(left.to_string().starts_with("ranks 1, 3 and 4 ended"));
    }
}
