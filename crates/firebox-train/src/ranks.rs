//! Training on several ranks: what they tell each other, round by round.
//!
//! All ranks take part in the same rounds. In each, every rank says what it has come to, and all
//! draw the same conclusion from what all have said. A rank that fails says so in its next round,
//! which ends training on all of them.

pub(crate) mod exchange;
pub(crate) mod metrics;
pub(crate) mod quiet;
pub(crate) mod start;

use firebox_ranks::{RankError, Ranks};
use firebox_trace::Bytes;
use serde::{Deserialize, Serialize};

use self::metrics::Sums;
use self::start::Begin;
use crate::error::TrainError;

/// The ranks of a run, as one of them sees them.
pub(crate) struct Team {
    pub(crate) ranks: Ranks,
    /// Why training stops, once all know it.
    stop: Option<Stop>,
    /// Made of the bits of the latest sum of gradients.
    fold: u64,
    /// Plans that rank 0 has not been told of.
    pub(crate) plans: Vec<String>,
    /// What an exchange takes of the device's memory.
    pub(crate) exchange: Bytes,
}

/// Why training stops before its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stop {
    pub(crate) message: String,
    /// Whether a signal asked for it.
    pub(crate) by_signal: bool,
}

/// What a rank says in a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Training begins.
    Begin(Begin),
    /// It has gradients of batches with this weight in the loss, or, if that is nothing, of so many
    /// items. Of which parameters, in the order of the module's visit.
    /// `follows`: whether the weight follows from the step, and is not what batches state, if that
    /// is another. `least`: the least weight that the mean is taken over.
    Step { weight: f64, least: f64, items: f64, follows: Option<bool>, has: Vec<bool> },
    /// It has no more data in this epoch.
    Done,
    /// It has taken over the state of rank 0.
    Begun,
    /// It has the sum of all gradients on its device. The parameter of which its own gradient is
    /// not finite.
    Summed(Option<String>),
    /// The epoch is over. The metrics of the rank's share, and a hash of its parameters.
    Epoch { metrics: Vec<Sums>, parameters: [u8; 32] },
    /// Whether training ends early.
    Early(bool),
    /// Training is over.
    End,
}

/// A word with what comes along in every round.
#[derive(Serialize, Deserialize)]
struct Said {
    word: Result<Word, String>,
    stop: Option<Stop>,
    fold: u64,
    plans: Vec<String>,
}

impl Team {
    pub(crate) fn new(ranks: Ranks) -> Self {
        Self { ranks, stop: None, fold: 0, plans: Vec::new(), exchange: Bytes::ZERO }
    }

    pub(crate) fn is_root(&self) -> bool {
        self.ranks.is_root()
    }

    /// Why training stops, if all ranks know that it does.
    pub(crate) fn stop(&self) -> Option<&Stop> {
        self.stop.as_ref()
    }

    /// Notes the sum of gradients that was made. The next round finds out whether it is the same on
    /// all ranks.
    pub(crate) fn summed(&mut self, fold: u64) {
        self.fold = fold;
    }

    /// Says a word, and listens to those of all ranks. `stop` is why this rank wants to stop.
    /// Plans of other ranks go to `tell`.
    ///
    /// # Errors
    ///
    /// If a rank has failed, does not answer, or says what does not belong here.
    pub(crate) fn round(
        &mut self,
        word: Word,
        stop: Option<Stop>,
        mut tell: impl FnMut(usize, &str),
    ) -> Result<Vec<Word>, TrainError> {
        let is_root = self.is_root();
        let said = self.say(Ok(word), stop)?;
        for (rank, said) in said.iter().enumerate().filter(|(rank, _)| is_root && *rank > 0) {
            said.plans.iter().for_each(|plan| tell(rank, plan));
        }
        let fold = said[0].fold;
        if let Some(rank) = said.iter().position(|said| said.fold != fold) {
            return Err(TrainError::Ranks(RankError::Unexpected {
                rank,
                message: "its gradients differ from those of rank 0 after they were summed"
                    .to_owned(),
            }));
        }
        if self.stop.is_none() {
            let own = self.ranks.rank();
            self.stop = said.iter().enumerate().find_map(|(rank, said)| {
                let stop = said.stop.clone()?;
                let message = match rank == own {
                    true => stop.message,
                    false => format!("rank {rank}: {}", stop.message),
                };
                Some(Stop { message, ..stop })
            });
        }
        let words: Vec<Word> = said.into_iter().filter_map(|said| said.word.ok()).collect();
        let first = std::mem::discriminant(&words[0]);
        let of_a_step = |word: &Word| matches!(word, Word::Step { .. } | Word::Done);
        let belongs = |word: &Word| {
            std::mem::discriminant(word) == first || of_a_step(word) && of_a_step(&words[0])
        };
        if let Some(rank) = words.iter().position(|word| !belongs(word)) {
            return Err(TrainError::Ranks(RankError::Unexpected {
                rank,
                message: format!("{:?}, where rank 0 says {:?}", words[rank], words[0]),
            }));
        }
        Ok(words)
    }

    /// Ends training: all ranks have come to their end, or one of them failed. An error that all
    /// know of already is returned as it is. Any other becomes the same error on all ranks.
    pub(crate) fn conclude(&mut self, result: Result<(), TrainError>) -> Result<(), TrainError> {
        let own = match result {
            Err(
                error @ (TrainError::Rank { .. }
                | TrainError::Ranks(_)
                | TrainError::NotFinite { .. }),
            ) => return Err(error),
            Err(error) => error,
            Ok(()) => return self.round(Word::End, None, |_, _| {}).map(|_| ()),
        };
        match self.say(Err(own.to_string()), None) {
            Err(TrainError::Rank { rank, message, .. }) if rank == self.ranks.rank() => {
                Err(TrainError::Rank { rank, message, cause: Some(Box::new(own)) })
            }
            Err(TrainError::Rank { rank, message, .. }) => {
                log::error!("{own}");
                Err(TrainError::Rank { rank, message, cause: None })
            }
            // The others do not hear of it. This rank has its own reason.
            Err(error) => {
                log::error!("{error}");
                Err(own)
            }
            Ok(_) => Err(own),
        }
    }

    fn say(
        &mut self,
        word: Result<Word, String>,
        stop: Option<Stop>,
    ) -> Result<Vec<Said>, TrainError> {
        let plans = std::mem::take(&mut self.plans);
        let said = self.ranks.tell(&Said { word, stop, fold: self.fold, plans })?;
        let failed = said.iter().enumerate().find_map(|(rank, said)| {
            said.word.as_ref().err().map(|message| (rank, message.clone()))
        });
        match failed {
            Some((rank, message)) => Err(TrainError::Rank { rank, message, cause: None }),
            None => Ok(said),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_this_rank_keeps_its_cause() {
        let mut team = Team::new(Ranks::alone());
        let words = team.round(Word::Done, None, |_, _| {}).expect("it is alone");
        assert_eq!(words, [Word::Done]);
        let error = team.conclude(Err(TrainError::EmptyLoader)).expect_err("it has failed");
        let TrainError::Rank { rank: 0, cause: Some(cause), .. } = &error else {
            panic!("{error:?}")
        };
        assert!(matches!(**cause, TrainError::EmptyLoader));
        let again = team.conclude(Err(error)).expect_err("it has failed");
        assert!(matches!(again, TrainError::Rank { .. }));
        assert!(team.conclude(Ok(())).is_ok());
    }

    #[test]
    fn a_stop_is_known_after_the_round() {
        let mut team = Team::new(Ranks::alone());
        assert_eq!(team.stop(), None);
        let stop = Stop { message: "enough".to_owned(), by_signal: false };
        team.round(Word::Done, Some(stop.clone()), |_, _| {}).expect("it is alone");
        team.round(Word::Done, None, |_, _| {}).expect("it is alone");
        assert_eq!(team.stop(), Some(&stop));
    }
}
