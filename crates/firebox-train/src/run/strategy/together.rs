//! The training loop on several ranks: what it says in each round, and the step with the gradients
//! of all. The loop calls it where ranks must agree.

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::train::Learner;
use burn::train::metric::store::EventStoreClient;
use firebox_lazy::LazyBackend;
use firebox_plan::LogNotWritten;
use firebox_ranks::RankError;

use super::accumulated::{Accumulated, Share};
use super::{AutoBatch, Position, Run};
use crate::components::{LazyComponents, TrainBatch, ValidBatch};
use crate::error::TrainError;
use crate::loss_scale::{Judgement, LossScale};
use crate::planner::Planner;
use crate::ranks::exchange::{Exchanged, exchange, has_gradient};
use crate::ranks::metrics::Sums;
use crate::ranks::start::{Begin, parameter_hash, start};
use crate::ranks::{Stop, Team, Word};
use crate::reduction::LossReduction;
use crate::signals::Signals;
use crate::splitter::Splitter;

/// The optimizer step that all ranks make together.
pub(super) struct Step {
    /// The weight of the batches of all ranks, or, if they weigh nothing, their items.
    total: f64,
    weighs_nothing: bool,
    /// Of which parameters any rank has a gradient.
    has: Vec<bool>,
}

impl Step {
    /// Whether there is a gradient.
    pub(super) fn has_any(&self) -> bool {
        self.total != 0.0 || !self.weighs_nothing
    }
}

impl<LC: LazyComponents, ST, SV> AutoBatch<LC, ST, SV> {
    /// Gives all ranks the state of rank 0. Returns the first epoch.
    pub(super) fn start_together(
        &self,
        team: Option<&mut Team>,
        learner: &mut Learner<LC>,
        store: &EventStoreClient,
        accumulation: usize,
        (epoch, epochs): (usize, usize),
    ) -> Result<usize, TrainError> {
        let Some(team) = team else { return Ok(epoch) };
        let model = learner.model();
        let reduction = self.settings.reduction();
        let begin = Begin::new::<LC::Backend, _>(&model, accumulation, (epoch, epochs), reduction);
        drop(model);
        start(team, learner, store, begin)
    }
}

impl<LC, ST, SV> Run<'_, LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    /// Says a word to all ranks, and whether this one wants to stop. Returns the words of all.
    /// None if there are no other ranks.
    fn agree(&mut self, word: Word) -> Result<Option<Vec<Word>>, TrainError> {
        let stop = self.wants_to_stop();
        let Some(team) = &mut self.team else { return Ok(None) };
        let settings = &self.strategy.settings;
        let tell = |rank: usize, plan: &str| {
            settings.say(log::Level::Info, &format!("rank {rank}: {plan}"));
        };
        let words = team.round(word, stop, tell)?;
        if let Some(stop) = team.stop().filter(|_| !self.asked.interrupter.should_stop()) {
            self.asked.interrupter.stop(Some(&stop.message));
        }
        Ok(Some(words))
    }

    /// Why this rank wants to stop.
    fn wants_to_stop(&self) -> Option<Stop> {
        self.notice_signal();
        let message = self.asked.interrupter.get_message();
        self.asked.interrupter.should_stop().then(|| Stop {
            message: message.unwrap_or_else(|| "interrupted".to_owned()),
            by_signal: self.asked.signals.as_ref().is_some_and(|signals| signals.seen().is_some()),
        })
    }

    /// The step that all ranks make with what each has accumulated. None if there are no others.
    pub(super) fn agree_on_step(
        &mut self,
        accumulated: &Accumulated<LC::TrainingModel>,
    ) -> Result<Option<Step>, TrainError> {
        if self.team.is_none() {
            return Ok(None);
        }
        // A failure of the device belongs to this rank, before the others give their gradients.
        self.on.watch.check()?;
        let has = has_gradient::<LC::Backend, _>(&self.learner.model(), accumulated.so_far());
        let Share { weight, least, items } = accumulated.share();
        let follows = self.known.follows();
        let words = self.agree(Word::Step { weight, least, items, follows, has })?;
        words.map(|words| step_of(&words, self.reduction())).transpose()
    }

    /// Takes part in the steps of ranks that have more batches in this epoch.
    pub(super) fn wait_for_others(
        &mut self,
        planner: &mut Planner,
        iteration: usize,
    ) -> Result<(), TrainError> {
        while !self.should_stop() {
            let Some(words) = self.agree(Word::Done)? else { return Ok(()) };
            if words.iter().all(|word| *word == Word::Done) {
                return Ok(());
            }
            let step = step_of(&words, self.reduction())?;
            self.step_lr();
            let mut nothing = Accumulated::new(self.reduction());
            self.apply(planner, &mut nothing, iteration, Some(step))?;
        }
        Ok(())
    }

    /// Shares the metrics of an epoch that is over. Checkpoints and early stopping see those of all
    /// ranks then, if the user asked for it. Says if parameters have drifted apart.
    pub(super) fn share_metrics(&mut self) -> Result<(), TrainError> {
        if self.team.is_none() {
            return Ok(());
        }
        let settings = &self.strategy.settings;
        let metrics = match settings.telling.metrics_directory.is_some() {
            true => settings.telling.metrics.of_epoch(&self.asked.store),
            false => Vec::new(),
        };
        let model = self.learner.model();
        let queue = &self.on.queue;
        let parameters = queue.alone(|| parameter_hash::<LC::Backend, _>(&model));
        let words = self.agree(Word::Epoch { metrics, parameters })?.unwrap_or_default();
        let mut all = Vec::new();
        for (rank, word) in words.into_iter().enumerate() {
            let Word::Epoch { metrics, parameters: of_rank } = word else { continue };
            all.push(metrics);
            if of_rank != parameters {
                self.strategy.settings.warn(&format!(
                    "the parameters of rank {rank} are not bit for bit those of this rank: their devices compute differently"
                ));
            }
        }
        self.merge_metrics(&all)
    }

    /// At rank 0: writes and shows the metrics of all ranks.
    fn merge_metrics(&self, all: &[Vec<Sums>]) -> Result<(), TrainError> {
        let settings = &self.strategy.settings;
        let Some(directory) = settings.telling.metrics_directory.as_ref() else { return Ok(()) };
        if !self.team.as_ref().is_some_and(Team::is_root) {
            return Ok(());
        }
        let means = settings
            .telling
            .metrics
            .merge(directory, all)
            .map_err(|(path, cause)| LogNotWritten { path, cause })?;
        let of = |(split, validation): (&str, bool)| {
            let of_split = means.iter().filter(move |mean| mean.1 == validation);
            let texts: Vec<String> =
                of_split.map(|(name, _, mean)| format!("{name} {mean:.4}")).collect();
            (!texts.is_empty()).then(|| format!("{split} {}", texts.join(", ")))
        };
        let splits = [("training", false), ("validation", true)];
        let texts: Vec<String> = splits.into_iter().filter_map(of).collect();
        if !texts.is_empty() {
            let text = format!("epoch {}, all ranks: {}", self.position.epoch, texts.join("; "));
            settings.say(log::Level::Info, &text);
        }
        Ok(())
    }

    /// Whether a validation ends before its last batch. No other rank waits for the rest of it.
    pub(super) fn stops_validating(&self) -> bool {
        self.should_stop() || self.team.is_some() && self.wants_to_stop().is_some()
    }

    /// Whether training ends early. Rank 0 decides.
    pub(super) fn ends_early(&mut self, own: bool) -> Result<bool, TrainError> {
        let words = self.agree(Word::Early(own))?;
        Ok(words.map_or(own, |words| words[0] == Word::Early(true)))
    }
}

/// The step of all ranks. Where the batches of some weigh nothing in a mean, the step is made of
/// those of the others.
fn step_of(words: &[Word], reduction: LossReduction) -> Result<Step, TrainError> {
    let weight_of = |word: &Word| match word {
        Word::Step { weight, .. } => *weight,
        _ => 0.0,
    };
    let least_of = |word: &Word| match word {
        Word::Step { least, .. } => *least,
        _ => 0.0,
    };
    let least = words.iter().map(least_of).fold(0.0, f64::max);
    let weight = words.iter().map(weight_of).sum::<f64>().max(least);
    let weighs_nothing = reduction == LossReduction::Mean && weight == 0.0;
    let mut step = Step { total: weight, weighs_nothing, has: Vec::new() };
    let mut units = None;
    for (rank, word) in words.iter().enumerate() {
        let Word::Step { weight, items, has, follows, .. } = word else { continue };
        if follows.is_some()
            && *weight != 0.0
            && units.replace(*follows).is_some_and(|it| it != *follows)
        {
            let message = "what its batches weigh follows from the step, and not so on another rank: state the weight that \
                 the loss divides by";
            return Err(TrainError::Ranks(RankError::Unexpected {
                rank,
                message: message.to_owned(),
            }));
        }
        if weighs_nothing {
            step.total += items;
        }
        if step.has.is_empty() {
            step.has = vec![false; has.len()];
        }
        if step.has.len() != has.len() || !weight.is_finite() {
            let message = "gradients of another model, or without a weight".to_owned();
            return Err(TrainError::Ranks(RankError::Unexpected { rank, message }));
        }
        // A rank whose batches weigh nothing gives no gradient if those of others weigh something.
        let counts = weighs_nothing || *items == 0.0;
        step.has.iter_mut().zip(has).for_each(|(any, has)| *any |= *has && counts);
    }
    Ok(step)
}

/// An optimizer step of all ranks, from its gradients to the point at which all make it.
pub(super) struct Together<'a> {
    team: &'a mut Team,
    step: Step,
    is_finite: bool,
    not_finite: Option<String>,
    /// Whether gradients that are not finite are no error: all leave the step out.
    skips: bool,
}

impl<'a> Together<'a> {
    pub(super) fn new(team: &'a mut Team, step: Step) -> Self {
        Self { team, step, is_finite: true, not_finite: None, skips: false }
    }

    /// Whether the step is made, with losses in half floats. If not, all ranks leave it out, or
    /// [`commit`](Self::commit) fails.
    pub(super) fn judge(&mut self, scale: &mut LossScale) -> bool {
        let judgement = scale.judge(self.is_finite);
        self.skips = judgement == Judgement::LeftOut;
        judgement == Judgement::Made
    }

    /// Sums the gradients of all ranks.
    ///
    /// # Errors
    ///
    /// If the sum does not end in time, or a gradient cannot be read or made.
    pub(super) fn sum<B, M>(
        &mut self,
        model: &M,
        accumulated: &mut Accumulated<M>,
    ) -> Result<GradientsParams, TrainError>
    where
        B: AutodiffBackend<InnerBackend: LazyBackend> + LazyBackend,
        M: AutodiffModule<B>,
    {
        let counts = self.step.weighs_nothing || accumulated.share().items == 0.0;
        let (grads, scale) = match counts {
            true => accumulated.gradients().take(self.step.total),
            false => (GradientsParams::new(), 1.0),
        };
        let exchanged = exchange(&self.team.ranks, model, grads, scale, &self.step.has)?;
        let Exchanged { grads, fold, is_finite, not_finite } = exchanged;
        (self.is_finite, self.not_finite) = (is_finite, not_finite);
        // Numbers that are not finite may have several forms.
        self.team.summed(if is_finite { fold } else { 0 });
        Ok(grads)
    }

    /// Waits until all ranks have the sums on their devices, so that all or none make the step.
    ///
    /// # Errors
    ///
    /// If a rank has failed, or the sum is not finite and the step is not left out.
    pub(super) fn commit(&mut self) -> Result<(), TrainError> {
        let words = self.team.round(Word::Summed(self.not_finite.take()), None, |_, _| {})?;
        if self.is_finite || self.skips {
            return Ok(());
        }
        let parameter = words.into_iter().enumerate().find_map(|(rank, word)| match word {
            Word::Summed(parameter) => parameter.map(|parameter| (rank, parameter)),
            _ => None,
        });
        Err(TrainError::NotFinite { parameter })
    }
}

impl<LC: LazyComponents, ST, SV> Run<'_, LC, ST, SV> {
    /// Stops the interrupter where a signal asks for it.
    pub(super) fn notice_signal(&self) {
        let signal = self.asked.signals.as_ref().and_then(Signals::seen);
        if let Some(signal) = signal.filter(|_| !self.asked.interrupter.should_stop()) {
            self.asked.interrupter.stop(Some(signal));
            let Position { epoch, batch: iteration, .. } = self.position;
            let text =
                format!("{signal}: training ends in epoch {epoch}, behind batch {iteration}");
            self.strategy.settings.say(log::Level::Warn, &text);
        }
    }
}
