"""A small network with Lightning: accumulation, plateau by an epoch's mean, validation in epochs.

On as many ranks as there are.
"""

import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.layers(x)
        loss = nn.functional.cross_entropy(out, y)
        self.accuracy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"},
        }


def main():
    warnings.simplefilter("ignore")
    pl.seed_everything(4, verbose=False)
    data = TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
    train = DataLoader(data, batch_size=5, shuffle=True)
    valid = DataLoader(data, batch_size=10)
    folder = f"{sys.argv[1]}.run"
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        accumulate_grad_batches=2,
        val_check_interval=2,
        callbacks=[
            pl.callbacks.EarlyStopping("val_loss", patience=50),
            pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2),
        ],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    trainer.fit(net, train, valid)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        torch.save([net.state_dict(), metrics], sys.argv[1])


if __name__ == "__main__":
    main()
